//! `flash-dma-cpu`.

use super::{NormCall, NormEngine, NormResults, heads_first};
use crate::Refused;
use crate::engines::cpu::view;
use crate::engines::{Cpu, Host, is_untouched, narrow, of_element, sentinels, widen};
use flash_dma_cpu::{self as engine, Element};

fn both<E: Host + Element>(call: &NormCall) -> Result<NormResults, Refused> {
    let p = &call.problem;
    let (x, grad_out): (Vec<E>, Vec<E>) = (narrow(&call.x.values), narrow(&call.grad_out.values));
    let gamma: Option<Vec<f32>> = call.gamma.as_ref().map(|gamma| narrow(gamma));
    let table: Option<Vec<f32>> = call.table.as_ref().map(|table| narrow(&table.values));
    let parameters = engine::NormParameters {
        gamma: gamma.as_deref(),
        table: (call.table.as_ref())
            .zip(table.as_ref())
            .map(|(raw, data)| view(raw, data)),
    };
    let len = p.x_shape().iter().product();
    let mut out: Vec<E> = sentinels(len);
    let result = engine::norm_forward(p, view(&call.x, &x), parameters, &mut out);
    result.map_err(|error| Refused::new(error, is_untouched(&out)))?;
    let mut grad_x: Vec<E> = sentinels(len);
    let mut grad_gamma: Option<Vec<f32>> = gamma.as_ref().map(|_| sentinels(p.width));
    let result = engine::norm_backward(
        p,
        gamma.as_ref().map(|_| view(&call.x, &x)),
        parameters,
        view(&call.grad_out, &grad_out),
        engine::NormGradients {
            x: &mut grad_x,
            gamma: grad_gamma.as_deref_mut(),
        },
    );
    result.map_err(|error| Refused::new(error, is_untouched(&grad_x)))?;
    Ok(NormResults {
        out: heads_first(&widen(&out), p),
        x: widen(&grad_x),
        gamma: grad_gamma.map(|gamma| widen(&gamma)),
    })
}

impl NormEngine for Cpu {
    fn norm(&self, call: &NormCall) -> Result<NormResults, Refused> {
        of_element!(call.problem.element, both(call))
    }
}
