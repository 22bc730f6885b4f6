//! Every form of product in isolation, for tests; the kernels use the products in the same way.

use crate::host::check::elem_type;
use crate::matrix::fragment::pack;
use crate::matrix::wgmma::boxes::{BoxPlace, boxes_of, copy_boxes, map_address, takes_boxes};
use crate::matrix::wgmma::panel::{Panels, panel_place, publish};
use crate::matrix::wgmma::product::{finish, finish_but, start_nt, start_pv};
use crate::matrix::wgmma::ring::Ring;
use crate::vectors::Segment;
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::{AttentionError, ElementType};

/// Rows of the operands, and keys of the second product.
const ROWS: usize = 64;

/// Both kinds of product of one warpgroup, for `a` and `b` of 64 rows and `columns` columns:
/// `[a b^T, b a^T]` and `sums + round(a b^T) b`.
///
/// | tensor | shape | type |
/// |---|---|---|
/// | `a`, `b` | `[1, 1, 64, columns]` | `element`, f16 or bf16 |
/// | `sums`, `results` | `[64, columns]`, contiguous | f32 |
/// | `products` | `[2, 64, 64]`, contiguous | f32 |
///
/// `columns` is a multiple of 16 up to 256. With `boxes` the TMA copies the operands, otherwise the units do.
///
/// # Errors
///
/// [`AttentionError::Unsupported`] if the device has no `wgmma`.
pub fn products_alone(
    client: &Client,
    element: ElementType,
    boxes: bool,
    [a, b]: [TensorBinding; 2],
    sums: TensorBinding,
    products: TensorBinding,
    results: TensorBinding,
) -> Result<(), AttentionError> {
    if !crate::matrix::blueprint::has_wgmma(client.properties()) {
        let what = "wgmma on this device".to_owned();
        return Err(AttentionError::Unsupported { what });
    }
    let columns = a.shape[3];
    let [a_boxes, b_boxes] = [&a, &b].map(|tensor| {
        let taken = boxes && takes_boxes(tensor, element.size());
        taken.then(|| boxes_of(tensor, element, 1, ROWS))
    });
    // SAFETY: the caller's buffers hold what the shapes say.
    unsafe {
        products_alone_kernel::launch_unchecked(
            client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_2d(32, 4),
            a.into_tensor_arg(),
            b.into_tensor_arg(),
            a_boxes.into(),
            b_boxes.into(),
            ResultsLaunch::new(
                sums.into_buffer_arg(),
                products.into_buffer_arg(),
                results.into_buffer_arg(),
            ),
            boxes,
            columns,
            element,
            elem_type(element),
        );
    }
    Ok(())
}

/// The sums that the products are added to, and the outputs.
#[derive(CubeType, CubeLaunch)]
struct Results {
    sums: Box<[Vector<f32, Const<2>>]>,
    /// Overwritten.
    products: Box<[Vector<f32, Const<2>>]>,
    /// Overwritten.
    results: Box<[Vector<f32, Const<2>>]>,
}

/// One warpgroup; buffers as in [`products_alone`], all outputs overwritten.
#[cube(launch_unchecked)]
fn products_alone_kernel<E: Float>(
    a: &Tensor<Segment<E>>,
    b: &Tensor<Segment<E>>,
    a_boxes: &ComptimeOption<TensorMap<E, Tiled>>,
    b_boxes: &ComptimeOption<TensorMap<E, Tiled>>,
    results: &mut Results,
    #[comptime] boxes: bool,
    #[comptime] columns: usize,
    #[comptime] element: ElementType,
    #[define(E)] _operand: ElemType,
) {
    let size!(NS) = comptime!(ROWS / 2);
    let size!(NO) = comptime!((columns / 2).next_power_of_two());
    let size!(NP) = comptime!(ROWS / 4);
    let segments = comptime!(columns / 8);
    let tile = comptime!(ROWS * columns / 8);
    let mut a_tile = Shared::<[Segment<E>]>::new_aligned_slice(tile, 1024usize);
    let mut b_tile = Shared::<[Segment<E>]>::new_aligned_slice(tile, 1024usize);
    let a_panels = Panels::at::<E>(&a_tile[0..1]);
    let b_panels = Panels::at::<E>(&b_tile[0..1]);
    let ring = Ring::new(1usize, 1usize, 128usize);
    if comptime!(boxes) {
        if UNIT_POS == 0 {
            ring.arrive_expecting(0usize, comptime!((4 * ROWS * columns) as u32));
            let from = BoxPlace {
                batch: 0usize,
                head: 0usize,
                row: 0usize,
            };
            let map = map_address::<E>(a_boxes);
            copy_boxes(map, &from, &a_panels, &ring, 0usize, ROWS, columns);
            let map = map_address::<E>(b_boxes);
            copy_boxes(map, &from, &b_panels, &ring, 0usize, ROWS, columns);
        }
        ring.wait_full(0usize, 0usize);
    } else {
        let mut at = UNIT_POS as usize;
        while at < tile {
            let (row, col) = (at / segments, at % segments);
            let place = panel_place(row, col, ROWS, segments);
            a_tile[place] = a[row * a.stride(2) / 8 + col];
            b_tile[place] = b[row * b.stride(2) / 8 + col];
            at += 128;
        }
        publish();
        sync_cube();
    }

    let s = start_nt::<NS>(&a_panels, &b_panels, element, ROWS, columns);
    let transposed = start_nt::<NS>(&b_panels, &a_panels, element, ROWS, columns);
    let s = finish_but::<NS>(s, 1usize, comptime!(ROWS / 2));
    let mut p = Vector::<u32, NP>::new(0u32);
    #[unroll]
    for i in 0..comptime!(ROWS / 4) {
        let (x, y) = comptime!((2 * i, 2 * i + 1));
        p.insert(i, pack(s.extract(x), s.extract(y), element));
    }
    let transposed = finish::<NS>(transposed, comptime!(ROWS / 2));
    write_rows::<NS>(&mut results.products, &s, 0usize, ROWS);
    let second = comptime!(ROWS * ROWS / 2);
    write_rows::<NS>(&mut results.products, &transposed, second, ROWS);

    let mut acc = Vector::<f32, NO>::new(0.0f32);
    let at = first_pair(columns);
    #[unroll]
    for c in 0..segments {
        #[unroll]
        for lower in 0..2usize {
            let pair = results.sums[at + comptime!(4 * c + lower * 8 * columns / 2)];
            acc.insert(comptime!(4 * c + 2 * lower), pair.extract(0usize));
            acc.insert(comptime!(4 * c + 2 * lower + 1), pair.extract(1usize));
        }
    }
    let acc = start_pv::<NO, NP>(acc, p, &b_panels, element, columns, ROWS);
    let acc = finish::<NO>(acc, comptime!((columns / 2).next_power_of_two()));
    write_rows::<NO>(&mut results.results, &acc, 0usize, columns);
}

/// Offset of this lane's first pair in rows of `columns` elements.
#[cube]
fn first_pair(#[comptime] columns: usize) -> usize {
    let (lane, warp) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
    (warp * 16 + lane / 4) * comptime!(columns / 2) + lane % 4
}

/// Writes an accumulator of `columns` columns from pair `begin` on.
#[cube]
fn write_rows<N: Size>(
    to: &mut [Vector<f32, Const<2>>],
    acc: &Vector<f32, N>,
    begin: usize,
    #[comptime] columns: usize,
) {
    let at = begin + first_pair(columns);
    #[unroll]
    for c in 0..comptime!(columns / 8) {
        #[unroll]
        for lower in 0..2usize {
            let mut pair = Vector::<f32, Const<2>>::new(acc.extract(comptime!(4 * c + 2 * lower)));
            pair.insert(1usize, acc.extract(comptime!(4 * c + 2 * lower + 1)));
            to[at + comptime!(4 * c + lower * 8 * columns / 2)] = pair;
        }
    }
}
