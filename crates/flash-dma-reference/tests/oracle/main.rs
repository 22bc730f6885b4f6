//! The oracle against closed forms, central differences and itself.

mod alibi;
mod attention;
mod composition;
mod dropout;
mod gradients;
mod sampled;
mod selection;
