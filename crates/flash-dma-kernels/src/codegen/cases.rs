//! Calls that together launch every variant. A case only adds variants that no earlier case has launched.

mod decoding;
mod masked;
mod norm;
mod products;
mod zoh;

use crate::args::{Far, Gradients, Inputs, LeftOut, Outputs, Saved, Selection};
use crate::codegen::cuda::Gpu;
use crate::host::engine::Engine;
use crate::pattern::intervals::tiles::QueryTiles;
use crate::pattern::intervals::{live_keys, tile_key_lists};
use crate::{
    AlibiSlopes, AttentionOptions, Dropout, ElementType, Problem, backward, forward, select,
};
use cubecl::client::Client;
use cubecl::prelude::TensorBinding;
use flash_dma_problem::{AttentionError, LeaveOneOut, contiguous_strides};

/// A call of the library.
pub(crate) struct Case {
    /// Names the variants it adds.
    pub name: String,
    /// The devices to make it on.
    pub gpus: &'static [Gpu],
    /// Makes the call.
    pub run: Box<dyn Fn(&Client)>,
}

/// Keys enough for three levels of the selection's tree, and heads enough to fill cubes.
const HEADS: usize = 8;
const K_LEN: usize = 128 << 10;
/// Keys too many for a selection by blocks.
const SORTED_K_LEN: usize = 1 << 20;
/// Keys of problems whose buffers exceed 32-bit indices.
const LONG_K_LEN: usize = 512 << 20;

pub(crate) fn all() -> Vec<Case> {
    let mut cases = selection();
    cases.extend(attention());
    cases.extend(decoding::all());
    cases.extend(masked::all());
    cases.extend(norm::all());
    cases.extend(products::all());
    cases.extend(zoh::all());
    cases
}

/// Selection and key lists, with 32 and 64 bit addresses.
pub(crate) fn selection() -> Vec<Case> {
    let mut cases = vec![case("select-long".into(), |client| {
        selected(client, SORTED_K_LEN, 2048);
    })];
    for (suffix, k_len) in [("", K_LEN), ("-64bit", LONG_K_LEN)] {
        cases.push(case(format!("select{suffix}"), move |client| {
            selected(client, k_len, 2048);
        }));
        cases.push(case(format!("select-all{suffix}"), move |client| {
            selected(client, k_len, k_len);
        }));
        cases.push(case(format!("lists{suffix}"), move |client| {
            let options = AttentionOptions::new().with_keep_window(2048);
            let shape = [1, HEADS, k_len, 64];
            let scores = Some(&shape[..3]);
            let problem = Problem::new(&shape, &shape, &shape, scores, ElementType::Bf16, &options)
                .expect("a valid problem");
            let live = live_keys(client, &problem, &selected(client, k_len, 2048));
            let tiles = QueryTiles::new(&problem, 64);
            let slice = tiles.slices(HEADS).next().expect("there are queries");
            tile_key_lists(client, &problem, &live, &tiles, slice);
        }));
    }
    cases
}

/// Forward and backward: every common head dimension with bf16, fewer with the other types, and
/// each option that changes the code.
fn attention() -> Vec<Case> {
    use ElementType::{Bf16, F16, F32};
    let sparse = AttentionOptions::new().with_keep_window(2048);
    let dims =
        |dims: &[usize], element| dims.iter().map(move |&d| (d, element)).collect::<Vec<_>>();
    let mut cases = Vec::new();
    for (head_dim, element) in [
        dims(&[32, 64, 96, 128, 192, 256], Bf16),
        dims(&[128], F16),
        dims(&[64, 256], F32),
    ]
    .concat()
    {
        let name = format!("{element}-d{head_dim}");
        let call = Attention::new(head_dim, element, Some(sparse));
        cases.push(call.case(name));
    }
    for (head_dim, element) in [(128, Bf16), (128, F32)] {
        let name = format!("{element}-d{head_dim}-dense");
        cases.push(Attention::new(head_dim, element, None).case(name));
    }
    let dropout = dropout();
    for (name, options) in [
        ("bf16-d128-full", sparse.with_causal(false)),
        ("bf16-d128-softcap", sparse.with_softcap(30.0)),
        ("bf16-d128-deterministic", sparse.with_deterministic(true)),
        ("bf16-d128-dropout", sparse.with_dropout(dropout)),
        ("bf16-d128-alibi", sparse.with_alibi(slopes())),
        (
            "bf16-d128-alibi-softcap",
            sparse.with_alibi(slopes()).with_softcap(30.0),
        ),
        (
            "bf16-d128-alibi-dropout",
            sparse.with_alibi(slopes()).with_dropout(dropout),
        ),
    ] {
        cases.push(Attention::new(128, Bf16, Some(options)).case(name.into()));
    }
    for (name, head_dim, element, options) in [
        ("bf16-d64-dropout", 64, Bf16, sparse),
        ("bf16-d96-dropout", 96, Bf16, sparse),
        ("f16-d128-dropout", 128, F16, sparse),
        (
            "bf16-d128-dropout-softcap",
            128,
            Bf16,
            sparse.with_softcap(30.0),
        ),
    ] {
        let options = options.with_dropout(dropout);
        cases.push(Attention::new(head_dim, element, Some(options)).case(name.into()));
    }
    let mut call = Attention::new(128, Bf16, Some(sparse.with_dropout(dropout)));
    call.residual = true;
    cases.push(call.case("bf16-d128-dropout-residual".into()));
    let options = AttentionOptions::new().with_dropout(dropout);
    let mut call = Attention::new(128, Bf16, Some(options));
    call.scored = false;
    cases.push(call.case("bf16-d128-dense-dropout".into()));
    let options = AttentionOptions::new().with_alibi(slopes());
    let mut call = Attention::new(128, Bf16, Some(options));
    call.scored = false;
    cases.push(call.case("bf16-d128-dense-alibi".into()));
    let mut call = Attention::new(128, Bf16, Some(sparse));
    call.row_padding = 1;
    cases.push(call.case("bf16-d128-unaligned".into()));
    let mut call = Attention::new(128, Bf16, Some(sparse));
    call.k_len = LONG_K_LEN;
    cases.push(call.case("bf16-d128-64bit".into()));
    for (name, head_dim, element, options) in [
        ("bf16-d64-residual", 64, Bf16, Some(sparse)),
        ("bf16-d128-residual", 128, Bf16, Some(sparse)),
        ("bf16-d256-residual", 256, Bf16, Some(sparse)),
        ("bf16-d128-dense-residual", 128, Bf16, None),
        ("f16-d128-residual", 128, F16, Some(sparse)),
    ] {
        let mut call = Attention::new(head_dim, element, options);
        call.residual = true;
        cases.push(call.case(name.into()));
    }
    for (name, options) in [
        ("bf16-d128-few", Some(sparse)),
        ("bf16-d128-few-dense", None),
    ] {
        let call = Attention {
            q_len: 16,
            backward: false,
            ..Attention::new(128, Bf16, options)
        };
        cases.push(call.case(name.into()));
        let call = Attention {
            residual: true,
            ..call
        };
        cases.push(call.case(format!("{name}-residual")));
    }
    for (name, head_dim, element, options) in [
        ("bf16-d32-runners", 32, Bf16, sparse),
        ("bf16-d64-runners", 64, Bf16, sparse),
        ("bf16-d96-runners", 96, Bf16, sparse),
        ("bf16-d128-runners", 128, Bf16, sparse),
        ("bf16-d192-runners", 192, Bf16, sparse),
        ("bf16-d256-runners", 256, Bf16, sparse),
        ("f16-d128-runners", 128, F16, sparse),
        ("f32-d64-runners", 64, F32, sparse),
        (
            "bf16-d128-runners-full",
            128,
            Bf16,
            sparse.with_causal(false),
        ),
        (
            "bf16-d128-runners-softcap",
            128,
            Bf16,
            sparse.with_softcap(30.0),
        ),
        (
            "bf16-d128-runners-alibi",
            128,
            Bf16,
            sparse.with_alibi(slopes()),
        ),
        (
            "bf16-d128-runners-deterministic",
            128,
            Bf16,
            sparse.with_deterministic(true),
        ),
    ] {
        let mut call = Attention::new(head_dim, element, Some(options));
        call.runners_up = true;
        cases.push(call.case(name.into()));
    }
    let mut call = Attention::new(128, Bf16, Some(sparse));
    (call.runners_up, call.grad_lse) = (true, false);
    cases.push(call.case("bf16-d128-runners-no-lse".into()));
    let mut call = Attention::new(128, Bf16, Some(sparse));
    (call.runners_up, call.k_len) = (true, LONG_K_LEN);
    cases.push(call.case("bf16-d128-runners-64bit".into()));
    // Enough chunks for tiles of 128 runners-up.
    (call.q_len, call.k_len) = (1 << 15, 1 << 15);
    cases.push(call.case("bf16-d128-runners-long".into()));
    let left_out = |head_dim, element, options| Attention {
        runners_up: true,
        left_out: true,
        ..Attention::new(head_dim, element, Some(options))
    };
    for (name, head_dim, element, options) in [
        ("bf16-d64-left-out", 64, Bf16, sparse),
        ("bf16-d96-left-out", 96, Bf16, sparse),
        ("bf16-d128-left-out", 128, Bf16, sparse),
        ("f32-d64-left-out", 64, F32, sparse),
        (
            "bf16-d128-left-out-deterministic",
            128,
            Bf16,
            sparse.with_deterministic(true),
        ),
    ] {
        cases.push(left_out(head_dim, element, options).case(name.into()));
    }
    let mut call = left_out(128, Bf16, sparse);
    call.grad_lse = false;
    cases.push(call.case("bf16-d128-left-out-no-lse".into()));
    let mut call = left_out(128, Bf16, sparse);
    (call.q_len, call.k_len) = (1 << 15, 1 << 15);
    cases.push(call.case("bf16-d128-left-out-long".into()));
    cases.extend(on_mma(sparse));
    cases
}

/// Attention on `mma`, on each kind of device with different limits: the head dimensions of most models.
fn on_mma(sparse: AttentionOptions) -> impl Iterator<Item = Case> {
    [
        ("mma-d64", 64, Some(sparse)),
        ("mma-d128", 128, Some(sparse)),
        ("mma-d256", 256, Some(sparse)),
        ("mma-d64-dense", 64, None),
        ("mma-d128-dense", 128, None),
    ]
    .map(|(name, head_dim, options)| {
        let mut call = Attention::new(head_dim, ElementType::Bf16, options);
        call.engines = &[Engine::Mma];
        Case {
            gpus: &Gpu::ALL,
            ..call.case(name.into())
        }
    })
    .into_iter()
}

fn slopes() -> AlibiSlopes {
    AlibiSlopes::standard(4 * HEADS)
}

fn dropout() -> Dropout {
    Dropout::new(0.1, 1).expect("a probability")
}

/// One call of forward, and of backward.
#[derive(Clone, Copy)]
struct Attention {
    head_dim: usize,
    element: ElementType,
    q_len: usize,
    k_len: usize,
    options: AttentionOptions,
    /// Whether keys have scores.
    scored: bool,
    /// Elements between the rows of `k` and `v`.
    row_padding: usize,
    /// The forward pass writes the residual of `out`, and the backward pass reads it.
    residual: bool,
    backward: bool,
    /// Whether the LSE has a gradient.
    grad_lse: bool,
    /// Whether the selection has runners-up.
    runners_up: bool,
    left_out: bool,
    /// Those to launch, if they support the problem; the portable one supports all.
    engines: &'static [Engine],
}

impl Attention {
    /// Without `options` there are no scores.
    fn new(head_dim: usize, element: ElementType, options: Option<AttentionOptions>) -> Self {
        Self {
            head_dim,
            element,
            q_len: 4096,
            k_len: K_LEN,
            options: options.unwrap_or_default(),
            scored: options.is_some(),
            row_padding: 0,
            residual: false,
            backward: true,
            grad_lse: true,
            runners_up: false,
            left_out: false,
            engines: &[Engine::Portable, Engine::Mma, Engine::Wgmma],
        }
    }

    fn case(self, name: String) -> Case {
        case(name, move |client| self.run(client))
    }

    fn run(self, client: &Client) {
        let (q_shape, kv_shape) = (
            [1, 4 * HEADS, self.q_len, self.head_dim],
            [1, HEADS, self.k_len, self.head_dim],
        );
        let scores_shape = self.scored.then_some(&kv_shape[..3]);
        let element = self.element;
        let problem = Problem::new(
            &q_shape,
            &kv_shape,
            &kv_shape,
            scores_shape,
            element,
            &self.options,
        )
        .expect("a valid problem");
        let selection = (self.scored).then(|| selected(client, self.k_len, problem.window));
        let words = || tensor(client, problem.scores_shape(), size_of::<u32>());
        let selection = selection.map(|selection| Selection {
            far: self.runners_up.then(|| Far {
                ends: words(),
                max_live: 2 * problem.window,
                left_out: self.left_out.then(|| LeftOut {
                    from: words(),
                    how: LeaveOneOut::default(),
                }),
            }),
            ..selection
        });
        let q = || tensor(client, q_shape, element.size());
        let kv = || tensor(client, kv_shape, element.size());
        let lse = tensor(client, problem.lse_shape(), size_of::<f32>());
        let padded = || {
            let [batch, heads, rows, dim] = kv_shape;
            let mut tensor = tensor(
                client,
                [batch, heads, rows, dim + self.row_padding],
                element.size(),
            );
            tensor.shape = kv_shape.into();
            tensor
        };
        let inputs = Inputs {
            q: q(),
            k: padded(),
            v: padded(),
            selection,
        };
        let saved = Saved {
            out: q(),
            residual: self.residual.then(q),
            lse: lse.clone(),
            lse_rest: Some(lse.clone()),
            grad_out: q(),
            grad_lse: self.grad_lse.then(|| lse.clone()),
        };
        let grads = Gradients {
            q: q(),
            k: kv(),
            v: kv(),
            scores: scores_shape.map(|_| tensor(client, problem.scores_shape(), size_of::<f32>())),
            rank: self.runners_up.then(words),
        };
        let call = |engine| {
            let outputs = Outputs {
                out: saved.out.clone(),
                residual: saved.residual.clone(),
                lse: lse.clone(),
                lse_rest: self.residual.then(|| lse.clone()),
            };
            forward::plan_on(engine, client, &problem, &inputs)?.run(outputs)
        };
        self.on_each(call);
        if !self.backward {
            return;
        }
        let call = |engine| {
            backward::plan_on(engine, client, &problem, &inputs, &saved)?.run(grads.clone())
        };
        self.on_each(call);
    }

    fn on_each(self, call: impl Fn(Engine) -> Result<(), AttentionError>) {
        for &engine in self.engines {
            let called = call(engine);
            assert!(called.is_ok() || engine != Engine::Portable, "{called:?}");
        }
    }
}

fn case(name: String, run: impl Fn(&Client) + 'static) -> Case {
    Case {
        name,
        gpus: Gpu::USUAL,
        run: Box::new(run),
    }
}

/// Scores and the intervals selected from them.
fn selected(client: &Client, k_len: usize, window: usize) -> Selection {
    let scores = tensor(client, [1, HEADS, k_len], size_of::<f32>());
    let intervals = tensor(client, [1, HEADS, k_len, 2], size_of::<u32>());
    select(client, scores.clone(), window, intervals.clone()).expect("a valid selection");
    Selection {
        scores,
        intervals,
        far: None,
    }
}

/// A contiguous tensor of undefined content.
pub(crate) fn tensor<const R: usize>(
    client: &Client,
    shape: [usize; R],
    elem_size: usize,
) -> TensorBinding {
    let strides = contiguous_strides(&shape).collect();
    let handle = client.empty(shape.iter().product::<usize>() * elem_size);
    // SAFETY: the buffer holds the product of the shape, and the strides are those of that shape.
    unsafe { TensorBinding::from_raw_parts(handle, strides, shape.into()) }
}
