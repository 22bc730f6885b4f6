//! `flash-dma-kernels` through a CubeCL client, without Burn.

use super::{NormCall, NormEngine, NormResults, heads_first};
use crate::engines::buffers::binding;
use crate::engines::kernels::{Kernels, Target};
use crate::{Layout, Refused};
use flash_dma_kernels as engine;

impl<T: Target> NormEngine for Kernels<T> {
    fn norm(&self, call: &NormCall) -> Result<NormResults, Refused> {
        let p = &call.problem;
        let x = self.upload(&call.x);
        let parameters = engine::NormParameters {
            gamma: (call.gamma.as_ref()).map(|gamma| self.tensor(gamma, &[p.width], p.gamma)),
            table: call.table.as_ref().map(|table| self.upload(table)),
        };
        // In the order of `x`, or in its own.
        let as_x = call.layout != Layout::Transposed;
        let shape = if as_x { p.x_shape() } else { p.out_shape() };
        let out = self.output(&shape, p.element, 0);
        let mut target = out.binding();
        if as_x {
            let [_, len, heads, width] = p.x_shape();
            let strides = [len * heads * width, width, heads * width, 1];
            target = binding(&out.handle, &p.out_shape(), &strides);
        }
        let result = engine::norm_forward(&self.client, p, x.clone(), &parameters, target);
        result.map_err(|error| Refused::new(error, self.is_untouched(&[&out])))?;
        let grad_x = self.output(&p.x_shape(), p.element, 0);
        let grad_gamma = (call.gamma.as_ref()).map(|_| self.output(&[p.width], p.gamma, 0));
        let result = engine::norm_backward(
            &self.client,
            p,
            call.gamma.as_ref().map(|_| x),
            &parameters,
            self.upload(&call.grad_out),
            None,
            engine::NormGradients {
                x: grad_x.binding(),
                gamma: grad_gamma.as_ref().map(|gamma| gamma.binding()),
            },
        );
        result.map_err(|error| Refused::new(error, self.is_untouched(&[&grad_x])))?;
        let out = self.read(&out);
        Ok(NormResults {
            out: if as_x { heads_first(&out, p) } else { out },
            x: self.read(&grad_x),
            gamma: grad_gamma.as_ref().map(|gamma| self.read(gamma)),
        })
    }
}
