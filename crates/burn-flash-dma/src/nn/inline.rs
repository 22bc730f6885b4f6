//! Score parameters of either kind, recorded under the names of fields of the layer itself.

use super::scorer::Scorer;
use burn::module::{
    Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor,
};
use burn::tensor::Device;
use core::fmt;

/// Name and type of the layer's [`Inline`] field, as Burn's derive announces it to visitors.
const FIELD: (&str, &str) = ("scorer", "Struct:DynamicMaskAttention");

/// A [`Scorer`] whose parameters are recorded at the level of the layer: `dt_proj`, not `scorer.Zoh.dt_proj`.
#[derive(Clone, Debug)]
pub(super) struct Inline(pub(super) Scorer);

impl Module for Inline {
    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        // A visitor keeps a path and is inside the field here: leave it, visit the parameters, and enter it again.
        visitor.exit_module(FIELD.0, FIELD.1);
        match &self.0 {
            Scorer::Zoh(zoh) => zoh.visit(visitor),
            Scorer::Linear(linear) => linear.visit(visitor),
        }
        visitor.enter_module(FIELD.0, FIELD.1);
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        mapper.exit_module(FIELD.0, FIELD.1);
        let mapped = match self.0 {
            Scorer::Zoh(zoh) => Scorer::Zoh(zoh.map(mapper)),
            Scorer::Linear(linear) => Scorer::Linear(linear.map(mapper)),
        };
        mapper.enter_module(FIELD.0, FIELD.1);
        Self(mapped)
    }

    fn num_params(&self) -> usize {
        Module::num_params(&self.0)
    }

    fn collect_devices(&self, devices: Devices) -> Devices {
        self.0.collect_devices(devices)
    }

    fn to_device(self, device: &Device) -> Self {
        Self(self.0.to_device(device))
    }

    fn fork(self, device: &Device) -> Self {
        Self(self.0.fork(device))
    }

    fn valid(&self) -> Self {
        Self(self.0.valid())
    }

    fn train(self) -> Self {
        Self(self.0.train())
    }

    fn materialize(self) -> Self {
        Self(self.0.materialize())
    }
}

impl ModuleDisplay for Inline {}

impl ModuleDisplayDefault for Inline {
    fn content(&self, content: Content) -> Option<Content> {
        match &self.0 {
            Scorer::Zoh(zoh) => zoh.content(content),
            Scorer::Linear(linear) => linear.content(content),
        }
    }

    fn num_params(&self) -> usize {
        Module::num_params(self)
    }
}

impl fmt::Display for Inline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.format(Default::default()))
    }
}
