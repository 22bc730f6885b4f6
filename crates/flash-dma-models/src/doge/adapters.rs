//! Adapters on weights, for which the files have no names.

use super::model::Doge;
use burn::module::{Module, ModuleVisitor};

impl Doge {
    /// The model without autodiff, with its LoRA adapters added to their weights. It has the parameters of a model
    /// without adapters, so it can be written; without adapters it is the same model. Sums are rounded to the type of
    /// the adapters, which is that of the weights unless another was requested.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::module::{Lora, Module};
    /// use burn::tensor::Device;
    /// use flash_dma_models::doge::{Doge, DogeConfig, ModelError};
    ///
    /// let (device, dir) = (Device::flex(), std::env::temp_dir().join("flash-dma-merged-example"));
    /// let config = DogeConfig::new(32, 1, 2).with_vocab_size(100).with_keep_window_size(16);
    /// let model = config.init(&device).apply_lora(Lora::new(2, 4.0));
    /// // The files have no place for adapters, and the weights alone would be another model.
    /// let refused = model.save_safetensors(&dir);
    /// assert!(matches!(refused, Err(ModelError::Adapters { .. })));
    ///
    /// model.merged().save_safetensors(&dir).unwrap();
    /// let loaded = Doge::from_safetensors(&dir, &device).unwrap();
    /// assert_eq!(loaded.num_params(), model.merged().num_params());
    /// # std::fs::remove_dir_all(&dir).unwrap();
    /// # }
    /// ```
    #[must_use]
    pub fn merged(&self) -> Self {
        self.valid().materialize()
    }

    pub(super) fn adapted(&self) -> Vec<String> {
        let mut visitor = Adapted::default();
        self.visit(&mut visitor);
        visitor.adapted
    }
}

/// Finds Burn's reparameterizations, such as LoRA.
#[derive(Default)]
struct Adapted {
    path: Vec<String>,
    adapted: Vec<String>,
}

impl ModuleVisitor for Adapted {
    fn enter_module(&mut self, name: &str, container: &str) {
        if container == "Reparameterization" {
            self.adapted.push(self.path.join("."));
        }
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }
}
