//! Linear scores: tokens times a direction per key/value head, and the gradient of the directions.

mod blueprint;
mod kernel;
#[cfg(test)]
mod tests;

use crate::host::check::{Layout, address_type, check_tensor, check_type, elem_type};
use crate::host::check::{reads_in, widest_vector};
use crate::host::range::range;
use crate::host::scratch::{cubes, scratch};
use crate::norm::blueprint::SumsBlueprint;
use crate::norm::sums::gamma_gradient_kernel;
use crate::team::Team;
use blueprint::{GradientBlueprint, ScoresBlueprint};
use cubecl::CubeDim;
use cubecl::client::Client;
use cubecl::ir::AddressType;
use cubecl::prelude::*;
use flash_dma_problem::{AttentionError, ElementType, TensorName};
use kernel::{TokensLaunch, linear_scores_gradient_kernel, linear_scores_kernel};

/// The most heads of a kernel: a unit has a sum, or a vector of them, for each.
pub const MAX_SCORE_HEADS: usize = 8;

/// Planes of a cube, each with a token.
const PLANES: usize = 8;
/// Units of a cube of the gradient, except where units are threads of a processor.
const UNITS: usize = 128;
/// The most parts that the gradient is summed in, and the fewest tokens of one.
const PARTS: usize = 512;
const FEWEST: usize = 16;

/// `out = tokens · directions`, each sum in f32:
///
/// | tensor | shape | type |
/// |---|---|---|
/// | `tokens` | `[batch, len, width]`, contiguous | `element` |
/// | `directions` | `[heads, width]`, contiguous | f32 |
/// | `out` | `[batch, heads, len]`, contiguous | f32 |
///
/// The call only enqueues: a failure on the device is reported when the result is read.
///
/// # Errors
///
/// [`AttentionError`], before any launch, if the device lacks the element type, there are more than [`MAX_SCORE_HEADS`]
/// heads, or a shape, stride or buffer does not fit.
pub fn linear_scores(
    client: &Client,
    element: ElementType,
    tokens: &TensorBinding,
    directions: &TensorBinding,
    out: &TensorBinding,
) -> Result<(), AttentionError> {
    let Some(call) = Call::new(
        client,
        element,
        tokens,
        directions,
        (TensorName::Scores, out),
    )?
    else {
        return Ok(());
    };
    let _range = range!("linear_scores");
    let bp = ScoresBlueprint {
        team: Team::new(client, PLANES),
        heads: call.heads,
    };
    let dim = bp.team.cube_dim();
    // SAFETY: every buffer was checked to hold its shape, and planes past the last token do nothing.
    unsafe {
        linear_scores_kernel::launch_unchecked(
            client,
            cubes(client, call.all.div_ceil(bp.team.planes), dim),
            dim,
            call.address,
            call.vector,
            tokens.clone().into_buffer_arg(),
            directions.clone().into_buffer_arg(),
            out.clone().into_buffer_arg(),
            call.tokens(),
            bp,
            elem_type(element),
        );
    }
    Ok(())
}

/// The gradient of the directions, `[heads, width]` in f32, from that of the scores, `[batch, heads, len]` in f32; the
/// order of additions is fixed.
///
/// # Errors
///
/// As [`linear_scores`].
pub fn linear_scores_gradient(
    client: &Client,
    element: ElementType,
    tokens: &TensorBinding,
    grad_out: &TensorBinding,
    gradient: &TensorBinding,
) -> Result<(), AttentionError> {
    let scores = (TensorName::GradScores, grad_out);
    let Some(call) = Call::new(client, element, tokens, gradient, scores)? else {
        return Ok(());
    };
    let _range = range!("linear_scores_gradient");
    let serial = client.properties().hardware.plane_size_max <= 1;
    let bp = GradientBlueprint {
        units: if serial { 1 } else { UNITS },
        heads: call.heads,
    };
    let (count, width) = (call.all.div_ceil(call.part()), call.width);
    let parts = scratch(client, [count, call.heads * width]);
    let blocks = (width / call.vector).div_ceil(bp.units);
    let sums = SumsBlueprint::choose(client);
    let columns = call.heads * width;
    // SAFETY: every buffer was checked to hold its shape; units past the width and tokens past the last are left out.
    // Each part is written before it is read.
    unsafe {
        linear_scores_gradient_kernel::launch_unchecked(
            client,
            CubeCount::Static(count as u32, blocks as u32, 1),
            CubeDim::new_1d(bp.units as u32),
            call.address.max(address_type(&[&parts], 4)),
            call.vector,
            tokens.clone().into_buffer_arg(),
            grad_out.clone().into_buffer_arg(),
            parts.clone().into_buffer_arg(),
            call.tokens(),
            bp,
            elem_type(element),
        );
        gamma_gradient_kernel::launch_unchecked(
            client,
            CubeCount::Static(columns.div_ceil(sums.columns) as u32, 1, 1),
            sums.cube_dim(),
            address_type(&[&parts], 4),
            parts.into_buffer_arg(),
            gradient.clone().into_buffer_arg(),
            count,
            columns,
            sums,
            f32::elem_type_native(),
        );
    }
    Ok(())
}

/// Checked sizes of a call.
struct Call {
    heads: usize,
    width: usize,
    len: usize,
    /// Tokens of all sequences.
    all: usize,
    /// Elements that are read at once.
    vector: usize,
    address: AddressType,
}

impl Call {
    /// The sizes; none without tokens or features.
    fn new(
        client: &Client,
        element: ElementType,
        tokens: &TensorBinding,
        directions: &TensorBinding,
        (name, scores): (TensorName, &TensorBinding),
    ) -> Result<Option<Self>, AttentionError> {
        check_type(client, element)?;
        let (&[batch, len, width], &[heads, _]) = (&tokens.shape[..], &directions.shape[..]) else {
            return Err(AttentionError::Unsupported {
                what: "tokens or directions of other axes".into(),
            });
        };
        if heads > MAX_SCORE_HEADS {
            return Err(AttentionError::Unsupported {
                what: format!("linear scores of {heads} heads: the most are {MAX_SCORE_HEADS}"),
            });
        }
        let (size, contiguous) = (element.size(), Layout::Contiguous);
        check_tensor(
            TensorName::Tokens,
            tokens,
            &[batch, len, width],
            size,
            contiguous,
        )?;
        check_tensor(
            TensorName::ScoreProjection,
            directions,
            &[heads, width],
            4,
            contiguous,
        )?;
        check_tensor(name, scores, &[batch, heads, len], 4, contiguous)?;
        if batch * len * width * heads == 0 {
            return Ok(None);
        }
        let fits = |n| reads_in(tokens, n, size) && reads_in(directions, n, 4);
        Ok(Some(Self {
            heads,
            width,
            len,
            all: batch * len,
            vector: widest_vector(client, size, fits),
            address: address_type(&[tokens], size).max(address_type(&[directions, scores], 4)),
        }))
    }

    /// Tokens of a part of the gradient's sums.
    fn part(&self) -> usize {
        self.all.div_ceil(PARTS).max(FEWEST)
    }

    fn tokens(&self) -> TokensLaunch {
        TokensLaunch::new(self.len, self.all, self.part(), self.width / self.vector)
    }
}
