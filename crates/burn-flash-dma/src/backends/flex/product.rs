//! Burn's own products, which are threaded and blocked: the default bodies.

use crate::ops::product::ProductOps;
use burn_flex::Flex;

impl ProductOps for Flex {}
