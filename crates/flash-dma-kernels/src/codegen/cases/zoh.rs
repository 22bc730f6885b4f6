//! Scores of a few tokens.

use crate::codegen::cases::{Case, case};
use crate::codegen::tensors::tensor;
use crate::{ElementType, ZohParameters, zoh_scores};

/// Heads and their features.
const HEADS: usize = 8;
const HEAD_DIM: usize = 128;

pub(super) fn all() -> Vec<Case> {
    use ElementType::{Bf16, F16, F32};
    let cases = [
        ("zoh-bf16", Bf16, Bf16, false),
        ("zoh-bf16-bias", Bf16, Bf16, true),
        ("zoh-bf16-f32", Bf16, F32, false),
        ("zoh-f16", F16, F16, false),
        ("zoh-f32", F32, F32, false),
    ];
    let of = |(name, element, of_parameters, bias): (&str, _, _, bool)| {
        case(name.into(), move |client| {
            let size = ElementType::size(of_parameters);
            let heads = || tensor(client, [HEADS], size);
            let parameters = ZohParameters {
                dt_proj: tensor(client, [HEADS, HEADS * HEAD_DIM], size),
                bias: bias.then(heads),
                a: heads(),
                element: of_parameters,
            };
            let values = tensor(client, [1, HEADS, 4, HEAD_DIM], ElementType::size(element));
            let out = tensor(client, [1, HEADS, 4], size_of::<f32>());
            let result = zoh_scores(client, &values, element, &parameters, &out);
            result.expect("a valid call");
        })
    };
    cases.map(of).into()
}
