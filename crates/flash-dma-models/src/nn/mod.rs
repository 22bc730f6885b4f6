//! Decoder blocks and what they are made of.
