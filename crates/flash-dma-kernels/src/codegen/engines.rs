//! The report of engines compared with the kernels that are launched, on every device, without a GPU.

use crate::args::Outputs;
use crate::codegen::cuda::Gpu;
use crate::codegen::recorder;
use crate::codegen::tensors::Attention;
use crate::host::engine::Engine;
use crate::report::{check_engine, engine_for, engines, fits_grid};
use crate::{AttentionOptions, ElementType, Forward, MaskedProblem, Problem};
use cubecl::client::Client;
use flash_dma_problem::{AttentionError, EngineChoice, Obstacle, PassKind, PassedOver};
use std::collections::HashMap;
use std::sync::Mutex;

const ALL: [Engine; 3] = [Engine::Wgmma, Engine::Mma, Engine::Portable];

fn problem(head_dim: usize, element: ElementType, options: AttentionOptions) -> Problem {
    let (q, kv) = ([1, 8, 2048, head_dim], [1, 2, 2048, head_dim]);
    let options = options.with_keep_window(256);
    Problem::new(&q, &kv, &kv, Some(&kv[..3]), element, &options).expect("a valid problem")
}

/// Runs both passes as a call does; returns the kernels' names for each.
fn launched(client: &Client, p: &Problem) -> [Vec<String>; 2] {
    let tensors = Attention::scored(client, p);
    let names = |run: &dyn Fn()| -> Vec<String> { recorder::names(client, |_| run()) };
    let forward = names(&|| {
        let plan = p
            .plan_forward(client, &tensors.inputs, None)
            .expect("a plan");
        let outputs = Outputs::new(tensors.saved.out.clone(), tensors.saved.lse.clone());
        plan.run(outputs).expect("a valid call");
    });
    let backward = names(&|| (tensors.backward(client, p, None)).expect("a valid call"));
    [forward, backward]
}

/// CUDA's grid has 65535 cubes along its second and third axis.
#[test]
fn more_heads_or_sequences_than_the_grid_has_are_refused_before_anything_is_launched() {
    let client = recorder::client(Gpu::H200);
    let of = |batch, heads, element| {
        let shape = [batch, heads, 8, 64];
        let options = AttentionOptions::new();
        Problem::new(&shape, &shape, &shape, None, element, &options).expect("a valid problem")
    };
    let (f32, bf16) = (ElementType::F32, ElementType::Bf16);
    for (problem, fits, refused) in [
        (of(65535, 1, bf16), true, None),
        (of(65536, 1, bf16), false, Some(65536)),
        (of(1, 65536, f32), false, Some(65536)),
        (of(70_000, 1, f32), false, Some(70_000)),
        // The portable kernels have an axis for each.
        (of(40_000, 2, f32), false, None),
    ] {
        let kernels = recorder::record(&client, |client| {
            assert_eq!(fits_grid(client, &problem), fits, "{problem:?}");
            let size = match check_engine(client, &problem, true) {
                Ok(()) => None,
                Err(AttentionError::Grid { size, limit, .. }) => {
                    assert_eq!(limit, 65535);
                    Some(size)
                }
                Err(other) => panic!("{other}"),
            };
            assert_eq!(size, refused, "{problem:?}");
        });
        assert!(kernels.is_empty());
    }
}

/// The name of a kernel that a pass launches on this engine and on no other.
fn mark(pass: PassKind, engine: Engine) -> &'static str {
    match (pass, engine) {
        (PassKind::Forward, Engine::Wgmma) => "forward_wgmma",
        (PassKind::Forward, Engine::Mma) => "forward_mma",
        (PassKind::Forward, _) => "forward",
        (_, Engine::Wgmma) => "dkdv_wgmma",
        (_, Engine::Mma) => "dkdv_mma",
        (_, _) => "dkdv",
    }
}

#[test]
fn the_report_names_the_engines_whose_kernels_are_launched() {
    use ElementType::{Bf16, F16, F32};
    let mut seen: HashMap<(PassKind, Engine), usize> = HashMap::new();
    for gpu in Gpu::ALL {
        let client = recorder::client(gpu);
        for (element, dims) in [
            (Bf16, &[8, 32, 48, 64, 80, 96, 128, 192, 224, 256][..]),
            (F16, &[64, 80]),
            (F32, &[64]),
        ] {
            for &head_dim in dims {
                let p = problem(head_dim, element, AttentionOptions::new());
                let report = engine_for(&client, &p).expect("a report");
                let [forward, backward] = launched(&client, &p);
                for (pass, engine, names) in [
                    (PassKind::Forward, report.forward, forward),
                    (PassKind::Backward, report.backward, backward),
                ] {
                    for other in ALL {
                        let ran = names.iter().any(|name| name == mark(pass, other));
                        let how = format!("{gpu:?} {element} {head_dim} {pass}: {names:?}");
                        assert_eq!(ran, other == engine, "{other} {how}");
                    }
                    let over = report.why.iter().filter(|over| over.pass == pass);
                    let over: Vec<Engine> = over.map(|over| over.engine).collect();
                    let faster = ALL.iter().take_while(|&&other| other != engine);
                    let what = format!("{gpu:?} {element} {head_dim} {pass}");
                    assert!(faster.eq(&over), "{what}: {over:?}");
                    *seen.entry((pass, engine)).or_default() += 1;
                }
            }
        }
    }
    // Every engine runs either pass of some problem.
    assert_eq!(seen.len(), 6, "{seen:?}");
}

#[test]
fn reasons_are_those_of_the_device_and_the_problem() {
    let reasons = |gpu, head_dim, element| {
        let p = problem(head_dim, element, AttentionOptions::new());
        let report = engine_for(&recorder::client(gpu), &p);
        report.expect("a report").why
    };
    let over = |pass, engine, obstacle| PassedOver {
        pass,
        engine,
        obstacle,
    };
    let dims = |head_dim, served| Obstacle::HeadDim { head_dim, served };
    use ElementType::{Bf16, F32};
    use Engine::{Mma, Wgmma};
    use PassKind::{Backward, Forward};
    assert_eq!(reasons(Gpu::H200, 128, Bf16), []);
    let expected = [
        over(Backward, Wgmma, dims(80, "64 and 128")),
        over(Backward, Mma, dims(80, "multiples of 32")),
    ];
    assert_eq!(reasons(Gpu::H200, 80, Bf16), expected);
    let expected = [Forward, Backward].map(|pass| over(pass, Wgmma, Obstacle::Device));
    assert_eq!(reasons(Gpu::A100, 128, Bf16), expected);
    let f32 = Obstacle::Element(F32);
    let both = |pass| [over(pass, Wgmma, f32), over(pass, Mma, f32)];
    let expected = [both(Forward), both(Backward)].concat();
    assert_eq!(reasons(Gpu::H200, 128, F32), expected);
    let small = over(Backward, Mma, Obstacle::SharedMemory);
    assert!(reasons(Gpu::Rtx4090, 256, Bf16).contains(&small));
}

#[test]
fn a_forced_engine_runs_or_is_refused_with_its_reason() {
    let client = recorder::client(Gpu::H200);
    let forced = |head_dim, engine| {
        let options = AttentionOptions::new().with_engine(EngineChoice::Only(engine));
        problem(head_dim, ElementType::Bf16, options)
    };
    for engine in ALL {
        let p = forced(128, engine);
        let report = engine_for(&client, &p).expect("a report");
        assert_eq!([report.forward, report.backward], [engine; 2]);
        let passes = [PassKind::Forward, PassKind::Backward];
        for (pass, names) in passes.into_iter().zip(launched(&client, &p)) {
            let ran = names.iter().any(|name| name == mark(pass, engine));
            assert!(ran, "{names:?}");
        }
    }
    let refused = |engine, pass, obstacle| {
        Err(AttentionError::Engine {
            engine,
            pass,
            obstacle,
        })
    };
    let p = forced(80, Engine::Wgmma);
    assert_eq!(check_engine(&client, &p, false), Ok(()));
    let (head_dim, served) = (80, "64 and 128");
    let obstacle = Obstacle::HeadDim { head_dim, served };
    let refused_backward = refused(Engine::Wgmma, PassKind::Backward, obstacle);
    assert_eq!(check_engine(&client, &p, true), refused_backward);
    let other = refused(Engine::Cpu, PassKind::Forward, Obstacle::OtherBackend);
    assert_eq!(
        check_engine(&client, &forced(128, Engine::Cpu), false),
        other
    );
}

#[test]
fn masks_and_devices_are_reported() {
    assert_eq!(engines(&recorder::client(Gpu::H200)), Ok(ALL.to_vec()));
    assert_eq!(engines(&recorder::client(Gpu::B200)), Ok(ALL[1..].to_vec()));
    let (q, kv) = ([1, 8, 512, 128], [1, 2, 512, 128]);
    let options = AttentionOptions::new();
    let element = ElementType::Bf16;
    let masked = |bias: [usize; 4]| {
        MaskedProblem::new(&q, &kv, &kv, None, Some(&bias), element, &options).expect("valid")
    };
    let client = recorder::client(Gpu::A100);
    let keys = engine_for(&client, &masked([1, 2, 1, 512])).expect("a report");
    assert_eq!((keys.forward, keys.backward), (Engine::Mma, Engine::Mma));
    let pairs = engine_for(&client, &masked([1, 2, 512, 512])).expect("a report");
    let both = (pairs.forward, pairs.backward);
    assert_eq!(both, (Engine::Mma, Engine::Portable));
    let reason = pairs.why.iter().find(|over| over.engine == Engine::Mma);
    assert_eq!(reason.map(|over| over.obstacle), Some(Obstacle::PairBias));
}

/// Everything that is logged in this process, by any test.
#[derive(Debug)]
struct Log;

static LOGGED: Mutex<Vec<String>> = Mutex::new(Vec::new());

impl log::Log for Log {
    fn enabled(&self, _metadata: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        let line = format!("{} {}", record.level(), record.args());
        LOGGED.lock().expect("no test panics here").push(line);
    }

    fn flush(&self) {}
}

/// No other test has this head dimension.
#[test]
fn unused_tensor_cores_are_warned_of_once_for_each_reason() {
    log::set_logger(&Log).expect("there is no other logger");
    log::set_max_level(log::LevelFilter::Warn);
    let warned = |gpu, options| {
        let client = recorder::client(gpu);
        let p = problem(112, ElementType::Bf16, options);
        engine_for(&client, &p).expect("a report says nothing");
        for _ in 0..2 {
            launched(&client, &p);
        }
        let mut logged = LOGGED.lock().expect("no test panics here");
        let mut own = std::mem::take(&mut *logged);
        own.retain(|line| line.contains("112"));
        own
    };
    let plain = AttentionOptions::new();
    let asked = plain.with_engine(EngineChoice::Only(Engine::Portable));
    assert!(warned(Gpu::Rtx5090, asked).is_empty(), "it was asked for");
    let both = warned(Gpu::Rtx5090, plain);
    assert_eq!(both.len(), 2, "{both:?}");
    assert_eq!(
        both[0],
        "WARN Rtx5090 (recorded): the forward pass runs on the portable kernels, although the device has tensor cores \
         (the mma kernels: the head dimension is 112, and there are kernels for multiples of 32). To use them, take a \
         head dimension of 64 or 128."
    );
    assert!(both[1].contains("the backward pass"), "{}", both[1]);
    let one = warned(Gpu::H200, plain);
    assert_eq!(one.len(), 1, "wgmma runs the forward pass: {one:?}");
}
