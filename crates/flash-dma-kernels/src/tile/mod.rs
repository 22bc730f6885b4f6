//! What forward and backward share.
