//! Plans, masks and biases.

use crate::codegen::cases::{Case, HEADS, case, with};
use crate::codegen::cuda::Gpu;
use crate::codegen::tensors::{self, mask_bits, tensor};
use crate::host::engine::Engine;
use crate::pattern::mask::args::MaskBits;
use crate::pattern::mask::plan::{plan, plan_ranges};
use crate::{AttentionOptions, ElementType, MaskedProblem, PlanGeometry};
use cubecl::client::Client;

const LEN: usize = 32 << 10;

pub(crate) fn all() -> Vec<Case> {
    let (heads, pairs) = (Some(HEADS), Some(LEN));
    let call = |head_dim, mask, bias| Masked::new(head_dim, mask, bias);
    let base = call(128, heads, Some(1));
    let in_f32 = with(base, |c| c.element = ElementType::F32);
    let mut cases = Vec::new();
    for (name, call) in [
        ("bf16-d128", base),
        ("bf16-d64", call(64, heads, Some(1))),
        ("bf16-d128-no-bias", call(128, heads, None)),
        ("bf16-d128-no-mask", call(128, None, Some(1))),
        ("bf16-d128-heads", call(128, Some(4 * HEADS), Some(1))),
        ("bf16-d128-pairs", call(128, heads, pairs)),
        ("bf16-d128-pairs-no-mask", call(128, None, pairs)),
        ("bf16-d64-pairs", call(64, heads, pairs)),
        ("f32-d128", in_f32),
    ] {
        cases.push(call.case(name));
    }
    // The variants that pack masks of each shape and element size, and ranges instead of a mask.
    for (name, queries, len, size) in [
        ("plan-rows", LEN, LEN, 1),
        ("plan-rows-words", LEN, LEN, 4),
        ("plan-rows-odd", LEN - 1, LEN - 1, 1),
        ("plan-rows-odd-words", LEN - 1, LEN - 1, 4),
        ("plan-any", 1, LEN, 1),
    ] {
        cases.push(case(name.into(), move |client| {
            let (geometry, bits) = planned(client, queries, len);
            let mask = tensor(client, geometry.mask, size);
            plan(client, &geometry, mask, size, false, bits).expect("a valid plan");
        }));
    }
    cases.push(case("plan-ranges".into(), |client| {
        let (geometry, bits) = planned(client, LEN, LEN);
        let keys = || tensor(client, [1, 1, LEN, 1], 4);
        plan_ranges(client, &geometry, keys(), keys(), bits).expect("valid ranges");
    }));
    // Without `wgmma`, on each kind of device with different limits.
    for (name, head_dim, mask, bias) in [
        ("mma-d128", 128, heads, Some(1)),
        ("mma-d64", 64, heads, Some(1)),
        ("mma-d256", 256, heads, Some(1)),
        ("mma-d128-no-bias", 128, heads, None),
        ("mma-d128-no-mask", 128, None, Some(1)),
        ("mma-d128-heads", 128, Some(4 * HEADS), Some(1)),
        ("mma-d128-pairs", 128, heads, pairs),
    ] {
        let call = with(call(head_dim, mask, bias), |c| c.engines = &[Engine::Mma]);
        cases.push(with(call.case(name), |case| case.gpus = &Gpu::ALL));
    }
    let dropped = AttentionOptions::new().with_dropout(super::dropout());
    let biased = AttentionOptions::new().with_alibi(super::slopes());
    let on = |call: Masked, options, engines| {
        with(call, |c| (c.options, c.engines) = (options, engines))
    };
    let of_pairs = call(128, heads, pairs);
    let residual = with(base, |c| (c.residual, c.engines) = (true, ALL));
    for (name, call) in [
        ("bf16-d128-dropout", on(base, dropped, base.engines)),
        (
            "bf16-d128-pairs-dropout",
            on(of_pairs, dropped, base.engines),
        ),
        ("mma-d128-dropout", on(base, dropped, &[Engine::Mma])),
        ("bf16-d128-alibi", on(base, biased, ALL)),
        ("bf16-d128-pairs-alibi", on(of_pairs, biased, ALL)),
        ("bf16-d128-residual", residual),
    ] {
        cases.push(call.case(name));
    }
    cases
}

const ALL: &[Engine] = &[Engine::Portable, Engine::Mma, Engine::Wgmma];

/// A mask of `queries` rows, or of one for all, and room for its plan.
fn planned(client: &Client, queries: usize, len: usize) -> (PlanGeometry, MaskBits) {
    let geometry =
        PlanGeometry::new(&[1, 1, queries, len], [len; 2], true).expect("a valid geometry");
    let bits = mask_bits(client, &geometry);
    (geometry, bits)
}

#[derive(Clone, Copy)]
struct Masked {
    head_dim: usize,
    element: ElementType,
    /// Heads of the mask.
    mask: Option<usize>,
    /// Queries of the bias.
    bias: Option<usize>,
    /// The forward pass writes the residual of `out`, and the backward pass reads it.
    residual: bool,
    options: AttentionOptions,
    /// Engines to launch, if they support the problem.
    engines: &'static [Engine],
}

impl Masked {
    fn new(head_dim: usize, mask: Option<usize>, bias: Option<usize>) -> Self {
        Self {
            head_dim,
            element: ElementType::Bf16,
            mask,
            bias,
            residual: false,
            options: AttentionOptions::new(),
            engines: &[Engine::Portable, Engine::Wgmma],
        }
    }

    fn case(self, name: &str) -> Case {
        case(format!("masked-{name}"), move |client| self.run(client))
    }

    fn run(self, client: &Client) {
        let (q, kv) = (
            [1, 4 * HEADS, LEN, self.head_dim],
            [1, HEADS, LEN, self.head_dim],
        );
        let heads = self.mask.unwrap_or(HEADS);
        let mask = self.mask.map(|heads| [1, heads, LEN, LEN]);
        let bias = self.bias.map(|queries| [1, heads, queries, LEN]);
        let [mask, bias] = [&mask, &bias].map(|shape| shape.as_ref().map(<[usize; 4]>::as_slice));
        let problem = MaskedProblem::new(&q, &kv, &kv, mask, bias, self.element, &self.options);
        let problem = problem.expect("a valid problem");
        let mut tensors = tensors::Attention::masked(client, &problem);
        if let (Some(geometry), Some(bits)) = (&problem.plan, &tensors.inputs.plan) {
            let mask = tensor(client, geometry.mask, 1);
            plan(client, geometry, mask, 1, false, bits.clone()).expect("a valid plan");
        }
        tensors.saved.residual = self.residual.then(|| tensors.saved.out.clone());
        for &engine in self.engines {
            // Refused if the engine does not support the problem.
            let _ = tensors.forward(client, &problem, Some(engine));
            let _ = tensors.backward(client, &problem, Some(engine));
        }
    }
}
