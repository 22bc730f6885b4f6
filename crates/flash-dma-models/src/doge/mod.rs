//! The Doge family.
