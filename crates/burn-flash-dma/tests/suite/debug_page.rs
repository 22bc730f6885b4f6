//! The programs of the book's page "See which engine runs, find a NaN, profile".

use crate::case::random;
use burn::tensor::Device;
use burn_flash_dma::{AttentionOptions, ElementType, Problem, dynamic_mask_attention};

#[test]
fn an_engine_is_reported_and_forced() -> Result<(), burn_flash_dma::AttentionError> {
    let device = Device::flex();
    // ANCHOR: report
    use burn_flash_dma::engines::{engine_for, engines};

    println!("{:?}", engines(&device)?);
    let (q, kv) = ([1, 8, 4096, 80], [1, 2, 4096, 80]);
    let options = AttentionOptions::new().with_keep_window(512);
    let problem = Problem::new(&q, &kv, &kv, Some(&kv[..3]), ElementType::Bf16, &options)?;
    println!("{}", engine_for(&problem, &device)?);
    // ANCHOR_END: report
    let text = engine_for(&problem, &device)?.to_string();
    assert_eq!(text, "forward: the CPU engine\nbackward: the CPU engine");

    let [q, k, v] = [4, 2, 2].map(|heads| random([1, heads, 32, 8], &device));
    let scores = random([1, 2, 32], &device);
    let rows = || (q.clone(), k.clone(), v.clone(), scores.clone());
    // ANCHOR: forced
    use burn_flash_dma::engines::{Engine, EngineChoice};

    let options = AttentionOptions::new().with_keep_window(16);
    // On a GPU `Engine::Portable` is a second opinion on its tensor cores.
    let forced = options.with_engine(EngineChoice::Only(Engine::Cpu));
    let (q, k, v, scores) = rows();
    let difference =
        dynamic_mask_attention(q.clone(), k.clone(), v.clone(), scores.clone(), options)
            - dynamic_mask_attention(q, k, v, scores, forced);
    println!("at most {}", difference.abs().max().into_scalar::<f32>());
    // ANCHOR_END: forced
    let (q, k, v, scores) = rows();
    let one = dynamic_mask_attention(q.clone(), k.clone(), v.clone(), scores.clone(), options);
    let other = dynamic_mask_attention(q, k, v, scores, forced);
    assert!((one - other).abs().max().into_scalar::<f32>() < 1e-5);
    Ok(())
}

#[test]
fn a_nan_is_found() {
    let device = Device::flex().autodiff();
    let q = random([1, 4, 32, 8], &device).require_grad();
    let [k, v] = [2, 2].map(|heads| random([1, heads, 32, 8], &device));
    let scores = random([1, 2, 32], &device);
    let options = AttentionOptions::new().with_keep_window(16);
    let out = dynamic_mask_attention(q.clone(), k.clone(), v.clone(), scores.clone(), options);
    let grads = out.clone().sum().backward();
    let step = 120;
    // ANCHOR: finite
    use burn_flash_dma::finite::FiniteChecks;

    let checked = FiniteChecks::new(step)
        .tensor("q", &q)
        .tensor("k", &k)
        .tensor("v", &v)
        .hiding("scores", &scores) // -inf hides a key and is no fault
        .tensor("out", &out)
        .gradient("the gradient of q", &q, &grads)
        .try_check();
    if let Err(error) = checked {
        eprintln!("{error}");
    }
    // ANCHOR_END: finite
    let again = FiniteChecks::new(step).tensor("q", &q).tensor("out", &out);
    assert_eq!(again.try_check(), Ok(()));
}
