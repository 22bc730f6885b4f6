//! Generation: samplers, batches of prompts, beams, speculative decoding.
