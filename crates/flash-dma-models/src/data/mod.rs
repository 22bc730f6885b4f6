//! Text to token files, packing into fixed lengths, batches that resume.
