//! Cross-entropy of rows of logits, each direction in one pass over them.

mod kernel;
#[cfg(test)]
mod tests;

use crate::host::check::{Layout, address_type, check_tensor, check_type, elem_type};
use crate::host::check::{reads_in, widest_vector};
use crate::host::range::range;
use crate::host::scratch::cubes;
use crate::team::Team;
use cubecl::CubeDim;
use cubecl::client::Client;
use cubecl::ir::AddressType;
use cubecl::prelude::*;
use flash_dma_problem::{AttentionError, ElementType, TensorName};
use kernel::{RowSizesLaunch, losses_gradient_kernel, losses_kernel};

/// Planes of a cube, each with a row.
const PLANES: usize = 8;

/// Rows of logits and their classes, all contiguous.
#[derive(Clone, Debug)]
pub struct LossRows {
    /// Type of the logits.
    pub element: ElementType,
    /// `[rows, classes]`.
    pub logits: TensorBinding,
    /// Class of each row, `[rows]` in i32. A row of a class that does not exist has a loss of NaN.
    pub targets: TensorBinding,
    /// Parts of the softmax `exp((logit - greatest) - log_sum)` of each row, `[rows, 2]` in f32. Their sum, a single number,
    /// would be rounded to the last bit of the greatest logit, and the probabilities with it.
    pub normaliser: TensorBinding,
}

/// Writes `losses`, the cross-entropy of each row, contiguous `[rows]` in f32 and nats, and the normaliser.
///
/// The call only enqueues: a failure on the device is reported when the result is read.
///
/// # Errors
///
/// [`AttentionError`], before any launch, if the device lacks the element type or a shape, stride or buffer does not fit.
pub fn losses(
    client: &Client,
    rows: &LossRows,
    losses: &TensorBinding,
) -> Result<(), AttentionError> {
    let Some(call) = Call::new(client, rows, (TensorName::Losses, losses), None)? else {
        return Ok(());
    };
    let _range = range!("losses");
    // SAFETY: every buffer was checked to hold its shape, and planes past the last row do nothing.
    unsafe {
        losses_kernel::launch_unchecked(
            client,
            call.cubes(client),
            call.dim(),
            call.address,
            call.vector,
            rows.logits.clone().into_buffer_arg(),
            rows.targets.clone().into_buffer_arg(),
            losses.clone().into_buffer_arg(),
            rows.normaliser.clone().into_buffer_arg(),
            call.sizes(),
            call.team,
            elem_type(rows.element),
        );
    }
    Ok(())
}

/// The gradient of the logits, in their shape and type, from that of the losses, contiguous `[rows]` in f32: to
/// `grad_logits`, or over the logits if that is none.
///
/// # Errors
///
/// As [`losses`].
pub fn losses_gradient(
    client: &Client,
    rows: &LossRows,
    grad_losses: &TensorBinding,
    grad_logits: Option<&TensorBinding>,
) -> Result<(), AttentionError> {
    let of_losses = (TensorName::GradLosses, grad_losses);
    let Some(call) = Call::new(client, rows, of_losses, grad_logits)? else {
        return Ok(());
    };
    let _range = range!("losses_gradient");
    let count = rows.logits.shape.iter().product();
    let gradient = match grad_logits {
        Some(tensor) => tensor.clone().into_buffer_arg(),
        None => BufferArg::alias(0, count),
    };
    // SAFETY: as in `losses`; a vector of logits is read before the one of its gradient is written.
    unsafe {
        losses_gradient_kernel::launch_unchecked(
            client,
            call.cubes(client),
            call.dim(),
            call.address,
            call.vector,
            rows.logits.clone().into_buffer_arg(),
            rows.targets.clone().into_buffer_arg(),
            rows.normaliser.clone().into_buffer_arg(),
            grad_losses.clone().into_buffer_arg(),
            gradient,
            call.sizes(),
            call.team,
            grad_logits.is_none(),
            elem_type(rows.element),
        );
    }
    Ok(())
}

/// Checked sizes of a call.
struct Call {
    rows: usize,
    /// Vectors of a row.
    items: usize,
    /// Logits that are read at once.
    vector: usize,
    address: AddressType,
    team: Team,
}

impl Call {
    /// The sizes; none without rows or classes.
    fn new(
        client: &Client,
        tensors: &LossRows,
        (name, losses): (TensorName, &TensorBinding),
        grad_logits: Option<&TensorBinding>,
    ) -> Result<Option<Self>, AttentionError> {
        let LossRows {
            element,
            logits,
            targets,
            normaliser,
        } = tensors;
        check_type(client, *element)?;
        let &[rows, classes] = &logits.shape[..] else {
            return Err(AttentionError::Rank {
                tensor: TensorName::Logits,
                expected: 2,
                actual: logits.shape.len(),
            });
        };
        let (size, contiguous) = (element.size(), Layout::Contiguous);
        let shape = [rows, classes];
        check_tensor(TensorName::Logits, logits, &shape, size, contiguous)?;
        check_tensor(TensorName::Targets, targets, &[rows], 4, contiguous)?;
        check_tensor(
            TensorName::Normaliser,
            normaliser,
            &[rows, 2],
            4,
            contiguous,
        )?;
        check_tensor(name, losses, &[rows], 4, contiguous)?;
        if let Some(gradient) = grad_logits {
            check_tensor(TensorName::GradLogits, gradient, &shape, size, contiguous)?;
        }
        if rows * classes == 0 {
            return Ok(None);
        }
        let wide: Vec<_> = [Some(logits), grad_logits].into_iter().flatten().collect();
        let fits = |n| wide.iter().all(|tensor| reads_in(tensor, n, size));
        let vector = widest_vector(client, size, fits);
        Ok(Some(Self {
            rows,
            items: classes / vector,
            vector,
            address: address_type(&wide, size).max(address_type(&[normaliser], 4)),
            team: Team::new(client, PLANES),
        }))
    }

    fn cubes(&self, client: &Client) -> CubeCount {
        cubes(client, self.rows.div_ceil(self.team.planes), self.dim())
    }

    fn dim(&self) -> CubeDim {
        self.team.cube_dim()
    }

    fn sizes(&self) -> RowSizesLaunch {
        RowSizesLaunch::new(self.rows, self.items)
    }
}
