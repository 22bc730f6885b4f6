//! The project's workload table: the timed shapes, as data.

use flash_dma_problem::{
    AlibiSlopes, AttentionError, AttentionOptions, Dropout, ElementType, Problem,
};
use flash_dma_reference::generate::Scores;

/// One attention shape and the distribution of its scores.
#[derive(Clone, Copy, Debug)]
pub struct Workload {
    /// Name in the rows.
    pub name: &'static str,
    pub batch: usize,
    pub q_heads: usize,
    pub kv_heads: usize,
    /// Queries per head, aligned with the end of the keys.
    pub q_len: usize,
    /// Keys per head.
    pub len: usize,
    pub head_dim: usize,
    /// Number of keys that each query keeps; `None` is dense attention without scores.
    pub window: Option<usize>,
    /// Element type of `q`, `k`, `v`.
    pub element: ElementType,
    /// The kind of scores, which determines which keys live and for how long.
    pub scores: Scores,
    /// Dropout probability of a pair; `None` is no dropout.
    pub dropout: Option<f32>,
    /// Adds ALiBi with the standard slopes to the logits.
    pub alibi: bool,
}

impl Workload {
    /// The causal problem of this workload, or the error of [`Problem::new`].
    pub fn problem(&self) -> Result<Problem, AttentionError> {
        let q = [self.batch, self.q_heads, self.q_len, self.head_dim];
        let kv = [self.batch, self.kv_heads, self.len, self.head_dim];
        let options = AttentionOptions {
            keep_window: self.window,
            dropout: self.dropout.map(|rate| Dropout::new(rate, 1)).transpose()?,
            alibi: self.alibi.then(|| AlibiSlopes::standard(self.q_heads)),
            ..AttentionOptions::new()
        };
        let scores = self.window.map(|_| &kv[..3]);
        Problem::new(&q, &kv, &kv, scores, self.element, &options)
    }
}

/// A layer of a current language model: 32 query and 8 key/value heads of 128.
const fn layer(name: &'static str, len: usize, window: Option<usize>) -> Workload {
    Workload {
        name,
        batch: 1,
        q_heads: 32,
        kv_heads: 8,
        q_len: len,
        len,
        head_dim: 128,
        window,
        element: ElementType::Bf16,
        scores: Scores::Normal,
        dropout: None,
        alibi: false,
    }
}

/// The reference implementation's headline shape: 2 query heads and 1 key/value head of 64.
const fn small(name: &'static str, len: usize, window: Option<usize>) -> Workload {
    Workload {
        q_heads: 2,
        kv_heads: 1,
        head_dim: 64,
        ..layer(name, len, window)
    }
}

/// A layer with few queries at the end of 32K keys, as in decoding: the forward pass splits the keys.
const fn few(name: &'static str, q_len: usize, window: Option<usize>) -> Workload {
    Workload {
        q_len,
        ..layer(name, 32768, window)
    }
}

/// Heads wider than 128: 8 query and 2 key/value heads.
const fn wide(name: &'static str, head_dim: usize) -> Workload {
    Workload {
        q_heads: 8,
        kv_heads: 2,
        head_dim,
        ..layer(name, 4096, Some(1024))
    }
}

/// A layer of 32K tokens that keeps 2048 keys by scores of this kind.
const fn kind(name: &'static str, scores: Scores) -> Workload {
    Workload {
        scores,
        ..layer(name, 32768, Some(2048))
    }
}

/// Every workload, smallest first within a family.
pub const WORKLOADS: &[Workload] = &[
    few("few-q1-n32k-dense", 1, None),
    few("few-q16-n32k-dense", 16, None),
    few("few-q128-n32k-dense", 128, None),
    few("few-q128-n32k-w8192", 128, Some(8192)),
    few("few-q512-n32k-dense", 512, None),
    small("small-n1k-dense", 1024, None),
    small("small-n2k-dense", 2048, None),
    small("small-n4k-dense", 4096, None),
    small("small-n4k-w1024", 4096, Some(1024)),
    small("small-n8k-dense", 8192, None),
    small("small-n16k-w1024", 16384, Some(1024)),
    small("small-n32k-w1024", 32768, Some(1024)),
    small("small-n32k-dense", 32768, None),
    Workload {
        element: ElementType::F32,
        ..small("small-n32k-w1024-f32", 32768, Some(1024))
    },
    wide("wide-d192-n4k-w1024", 192),
    wide("wide-d256-n4k-w1024", 256),
    layer("layer-n4k-w2048", 4096, Some(2048)),
    layer("layer-n4k-dense", 4096, None),
    layer("layer-n8k-w2048", 8192, Some(2048)),
    layer("layer-n8k-dense", 8192, None),
    layer("layer-n16k-w2048", 16384, Some(2048)),
    layer("layer-n16k-dense", 16384, None),
    Workload {
        dropout: Some(0.1),
        ..layer("layer-n16k-dense-dropout", 16384, None)
    },
    Workload {
        alibi: true,
        ..layer("layer-n16k-dense-alibi", 16384, None)
    },
    Workload {
        head_dim: 64,
        ..layer("layer-d64-n16k-dense", 16384, None)
    },
    layer("layer-n32k-w512", 32768, Some(512)),
    layer("layer-n32k-w1024", 32768, Some(1024)),
    Workload {
        element: ElementType::F32,
        ..layer("layer-n32k-w1024-f32", 32768, Some(1024))
    },
    layer("layer-n32k-w2048", 32768, Some(2048)),
    Workload {
        dropout: Some(0.1),
        ..layer("layer-n32k-w2048-dropout", 32768, Some(2048))
    },
    Workload {
        alibi: true,
        ..layer("layer-n32k-w2048-alibi", 32768, Some(2048))
    },
    kind("layer-n32k-w2048-recency", Scores::Recency),
    kind("layer-n32k-w2048-increasing", Scores::Increasing),
    kind("layer-n32k-w2048-blocks", Scores::Blocks),
    kind("layer-n32k-w2048-ties", Scores::AllEqual),
    layer("layer-n32k-w4096", 32768, Some(4096)),
    layer("layer-n32k-w8192", 32768, Some(8192)),
    layer("layer-n32k-dense", 32768, None),
    layer("layer-n128k-w2048", 131_072, Some(2048)),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_workload_is_valid_and_its_name_is_unique() {
        for w in WORKLOADS {
            w.problem().unwrap();
            let named = WORKLOADS.iter().filter(|other| other.name == w.name);
            assert_eq!(named.count(), 1, "{}", w.name);
        }
    }
}
