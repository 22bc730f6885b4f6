//! The meaning of the decoding and mask cases' names, and the peers' rows that belong beside them.

/// The cases of `decode.json`: name, description, and the peers' case with the same number of keys.
pub(super) const DECODINGS: [(&str, &str, &str); 15] = [
    (
        "layer-b8-w2048-c16k",
        "context 16K, w 2048, B 8, H 32/8, D 128",
        "B8 H32/8 K16384 D128",
    ),
    (
        "layer-b8-w2048-c64k",
        "context 64K, w 2048, B 8, H 32/8, D 128",
        "",
    ),
    (
        "layer-b8-w2048-c128k",
        "context 128K, w 2048, B 8, H 32/8, D 128",
        "B8 H32/8 K131072 D128",
    ),
    (
        "layer-b8-w2048-c1m",
        "context 1M, w 2048, B 8, H 32/8, D 128",
        "",
    ),
    (
        "layer-b8-w2048-c128k-m4",
        "4 tokens, context 128K, w 2048, B 8, H 32/8, D 128",
        "",
    ),
    (
        "layer-b8-w2048-c128k-m16",
        "16 tokens, context 128K, w 2048, B 8, H 32/8, D 128",
        "",
    ),
    (
        "layer-b1-w2048-c128k",
        "context 128K, w 2048, B 1, H 32/8, D 128",
        "B1 H32/8 K131072 D128",
    ),
    (
        "small-w1024-c512k",
        "context 512K, w 1024, B 1, H 2/1, D 64",
        "B1 H2/1 K524288 D64",
    ),
    (
        "layer-b8-dense-c16k",
        "context 16K, every key, B 8, H 32/8, D 128",
        "B8 H32/8 K16384 D128",
    ),
    (
        "layer-b8-dense-c128k",
        "context 128K, every key, B 8, H 32/8, D 128",
        "B8 H32/8 K131072 D128",
    ),
    (
        "layer-b8-dense-c16k-m4",
        "4 tokens, context 16K, every key, B 8, H 32/8, D 128",
        "",
    ),
    (
        "layer-b1-dense-c128k",
        "context 128K, every key, B 1, H 32/8, D 128",
        "B1 H32/8 K131072 D128",
    ),
    (
        "small-dense-c16k",
        "context 16K, every key, B 1, H 2/1, D 64",
        "B1 H2/1 K16384 D64",
    ),
    (
        "small-dense-c128k",
        "context 128K, every key, B 1, H 2/1, D 64",
        "B1 H2/1 K131072 D64",
    ),
    (
        "small-dense-c512k",
        "context 512K, every key, B 1, H 2/1, D 64",
        "B1 H2/1 K524288 D64",
    ),
];

/// A case of `masks.json` and the peers that ran beside it.
pub(super) struct Mask {
    pub(super) case: &'static str,
    pub(super) what: &'static str,
    pub(super) len: usize,
    /// Peer and mask, as the peers' file calls them, and the table's name.
    pub(super) peers: &'static [(&'static str, &'static str, &'static str)],
}

const CUDNN: (&str, &str, &str) = ("cudnn", "causal", "cuDNN, dense");

const fn mask(
    case: &'static str,
    what: &'static str,
    len: usize,
    peers: &'static [(&'static str, &'static str, &'static str)],
) -> Mask {
    Mask {
        case,
        what,
        len,
        peers,
    }
}

/// The cases of `masks.json`.
pub(super) const MASKS: [Mask; 10] = [
    mask("n8k-unmasked", "N 8K, no mask", 8192, &[CUDNN]),
    mask(
        "n8k-all-visible",
        "N 8K, a mask that shows everything",
        8192,
        &[CUDNN],
    ),
    mask(
        "n8k-window1024",
        "N 8K, sliding window of 1024",
        8192,
        &[CUDNN],
    ),
    mask(
        "n8k-top2048-key-bias",
        "N 8K, top 2048 by a bias per key",
        8192,
        &[CUDNN],
    ),
    mask(
        "n8k-scattered25",
        "N 8K, a quarter of the pairs at random",
        8192,
        &[
            CUDNN,
            ("cudnn with a mask", "scattered25", "cuDNN reading the mask"),
            (
                "efficient with a mask",
                "scattered25",
                "PyTorch's memory-efficient attention reading the mask",
            ),
        ],
    ),
    mask("n8k-pair-bias", "N 8K, a bias per pair", 8192, &[]),
    mask(
        "n8k-window1024-pair-bias",
        "N 8K, sliding window of 1024, a bias per pair",
        8192,
        &[],
    ),
    mask(
        "n2k-head-pair-bias",
        "N 2K, a bias per pair and head",
        2048,
        &[],
    ),
    mask(
        "n32k-window1024",
        "N 32K, sliding window of 1024",
        32768,
        &[("flex", "window1024", "FlexAttention"), CUDNN],
    ),
    mask(
        "n32k-documents2k",
        "N 32K, packed documents of 2K",
        32768,
        &[("flex", "documents2048", "FlexAttention"), CUDNN],
    ),
];
