//! The texts of errors on the book's page of troubles are those that the errors print.

use flash_dma_problem::{
    AttentionError as E, ElementType as T, Engine, Obstacle, PassKind, TensorName as N,
};

const PAGE: &str = include_str!(concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../book/src/troubleshooting.md"
));

/// An error for each text in the tables of the chapter *Refusals*, in their order.
fn errors() -> Vec<E> {
    let unsupported = |what: &str| E::Unsupported { what: what.into() };
    vec![
        E::HeadRatio {
            q_heads: 3,
            kv_heads: 2,
        },
        E::Shape {
            tensor: N::Value,
            axis: 2,
            expected: 16,
            actual: 15,
        },
        E::HeadDim { head_dim: 12 },
        E::Broadcast {
            tensor: N::Bias,
            axis: 1,
            sizes: vec![4, 2],
            actual: 3,
        },
        E::Strides {
            tensor: N::Query,
            strides: vec![64, 8, 1, 8],
        },
        E::Buffer {
            tensor: N::Out,
            needed: 4096,
            actual: 2048,
        },
        E::element_type(N::Key, T::F16, T::F32),
        E::element_type(N::Tokens, T::Bf16, T::F16),
        E::ElementType {
            tensor: N::Query,
            expected: "f32, f16 or bf16".into(),
            actual: "f64".into(),
        },
        E::Device { tensor: N::Key },
        unsupported("arithmetic in bf16"),
        E::WindowWithoutScores,
        E::ZeroWindow,
        E::IntervalsWindow {
            options: 32,
            intervals: 16,
        },
        E::WindowParts {
            recent: 3,
            sinks: 2,
            window: 4,
        },
        E::PartsWithoutWindow {
            recent: 2,
            sinks: 4,
        },
        E::HeadWindows {
            windows: 3,
            kv_heads: 2,
        },
        E::SelectionNotCausal,
        E::DocumentQueries { q_len: 5, k_len: 7 },
        E::DocumentTokens {
            sequence: 1,
            tokens: 8,
            k_len: 7,
        },
        E::CumulativeLengths { index: 2 },
        E::PlanCausal {
            plan: true,
            options: false,
        },
        E::MaskedSelection {
            what: "a selection to look at",
        },
        E::PagesFull {
            held: 60,
            capacity: 64,
            tokens: 8,
        },
        E::PagesUsed { needed: 4, free: 2 },
        E::Tracked { tensor: N::Key },
        E::CacheNotCausal,
        E::Sequence { index: 2, batch: 2 },
        E::CacheWindow {
            cache: "64".into(),
            options: "32".into(),
        },
        E::CacheScores,
        E::Record {
            reason: "..".into(),
        },
        E::TokensWait { waiting: 4 },
        E::TooManyAccepted {
            count: 5,
            waiting: 4,
        },
        E::NotHolding,
        E::JoinedCaches {
            index: 1,
            what: "sizes",
        },
        E::Prefix {
            sequence: 1,
            tokens: 9,
            least: 0,
            most: 7,
        },
        E::BlockTable {
            reason: "..".into(),
        },
        E::TooLarge {
            what: "the number of tokens with rotary positions",
            size: 4096,
            limit: 2048,
        },
        E::IntervalBounds {
            key: 1,
            first: 1,
            end: 0,
            k_len: 2,
        },
        E::Scale { scale: f32::NAN },
        E::SecondOrder { tensor: N::Query },
        unsupported("FLASH_DMA_ENGINE=Mma (portable, mma or wgmma)"),
        E::NoEngine {
            backend: "LibTorch".into(),
        },
        E::Engine {
            engine: Engine::Wgmma,
            pass: PassKind::Backward,
            obstacle: Obstacle::HeadDim {
                head_dim: 80,
                served: "64 and 128",
            },
        },
    ]
}

#[test]
fn the_page_of_troubles_has_the_texts_that_are_printed() {
    let chapter = PAGE
        .split("\n## ")
        .find(|chapter| chapter.starts_with("Refusals\n"));
    let rows = chapter
        .expect("the chapter")
        .lines()
        .filter_map(|line| line.strip_prefix("| `"));
    let texts: Vec<&str> = rows
        .filter_map(|row| Some(row.split_once('`')?.0))
        .collect();
    let printed: Vec<String> = errors().iter().map(E::to_string).collect();
    assert_eq!(texts, printed);
    assert!(PAGE.contains(&E::Softcap { softcap: 0.0 }.to_string()));
    let failed = E::DeviceFailed {
        operation: "attention's forward pass",
        reason: String::new(),
    };
    assert!(PAGE.contains(&failed.to_string()));
}
