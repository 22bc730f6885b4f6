//! CubeK's product, for operands that no kernel of this crate serves.

use super::operands::{Operands, Output, Sizes};
use super::parts::{self, Division};
use crate::host::check::elem_type;
use crate::host::engine::{Engine, is_allowed};
use crate::host::scratch::scratch;
use cubecl::client::Client;
use cubecl::prelude::TensorBinding;
use cubek_matmul::definition::{MatmulElems, MatmulGlobalElems};
use cubek_matmul::launch::launch_ref;
use cubek_matmul::multi_level::Strategy;
use cubek_matmul::routine::BlueprintStrategy;
use cubek_std::InputBinding;
use flash_dma_problem::ElementType;

/// Writes `A B` to the contiguous `out` with sums in at most `most` parts, or returns the reason why nothing serves.
pub(super) fn launch(
    client: &Client,
    operands: &Operands,
    out: Output,
    most: usize,
) -> Result<(), String> {
    let Sizes { m, n, k } = operands.sizes();
    let element = operands.element;
    let division = Division::new(k, most);
    if division.count() == 1 {
        let factors = [operands.a.clone(), operands.b.clone()];
        return multiply(client, factors, element, out);
    }
    let sums = scratch(client, [division.count(), m, n]);
    let part = |factors, first, count| {
        let some = parts::some_of(&sums, first, count);
        let to = Output::new(&some, ElementType::F32);
        multiply(client, factors, element, to)
    };
    let Division { length, full, rest } = division;
    let batch = match full {
        1 => parts::terms(operands, 0, length),
        _ => parts::batch(operands, &division),
    };
    part(batch, 0, full)?;
    if rest > 0 {
        part(parts::terms(operands, full * length, rest), full, 1)?;
    }
    parts::add(client, &sums, out);
    Ok(())
}

/// Writes the product of A `[(batch,) m, k]` and B `[(batch,) k, n]` to `out`, `[(batch,) m, n]`, by the routines of
/// Burn's products without autotune, or returns the reason why nothing serves.
///
/// It is CubeK's `Strategy::Auto`, except that a routine that refuses a product is followed by the next one instead of
/// a panic, and that [`ENGINE_VARIABLE`](crate::host::engine::ENGINE_VARIABLE) may exclude the tensor cores.
fn multiply(
    client: &Client,
    factors: [TensorBinding; 2],
    element: ElementType,
    out: Output,
) -> Result<(), String> {
    let [element, out_element] = [element, out.element].map(elem_type);
    let globals = MatmulGlobalElems {
        lhs: element,
        rhs: element,
        out: out_element,
    };
    let tensor_cores = Strategy::SimpleCyclicCmma(BlueprintStrategy::default());
    let units = Strategy::SimpleUnit(BlueprintStrategy::default());
    let routines = [tensor_cores, units, Strategy::Naive];
    let excluded = usize::from(!is_allowed(Engine::Mma));
    let mut refused = Vec::new();
    for routine in routines.into_iter().skip(excluded) {
        let [a, b] = (factors.clone()).map(|factor| InputBinding::new(factor, element));
        let mut elements = MatmulElems::from_globals(&globals);
        let to = out.tensor.clone();
        debug_assert_eq!(elements.acc_global, out_element);
        match launch_ref(&routine.into(), client, a, b, to, &mut elements) {
            Ok(()) => return Ok(()),
            Err(error) => refused.push(error.to_string().trim().to_owned()),
        }
    }
    Err(refused.join("; "))
}
