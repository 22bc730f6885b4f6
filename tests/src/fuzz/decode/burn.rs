//! Burn: its caches are tested by the suite; the fuzzer does not drive them.

use super::{Decoder, Step};
use crate::engines::{Backend, Burn};
use crate::fuzz::spec::{Decoding, Spec};
use flash_dma_reference::Inputs;

impl<B: Backend> Decoder for Burn<B> {
    fn decodes(&self) -> bool {
        false
    }

    fn decode(&self, _: &Spec, _: &Decoding, _: &Inputs) -> Result<Vec<Step>, String> {
        Err("the fuzzer does not decode on Burn".into())
    }
}
