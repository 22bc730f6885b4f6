//! The device's launch grid: how many cubes a launch may have along each axis.

use crate::AttentionError;

/// Refuses a launch of `cubes` cubes (tiles, heads, sequences) on a device that launches at most `limits` along each
/// axis. CUDA launches at most 65535 along each of the last two.
///
/// # Errors
///
/// [`AttentionError::Grid`] for the first axis that is too long.
pub fn check_grid(cubes: [usize; 3], limits: [usize; 3]) -> Result<(), AttentionError> {
    let axes = [
        "the number of tiles",
        "the number of heads",
        "the number of sequences",
    ];
    for ((what, size), limit) in axes.into_iter().zip(cubes).zip(limits) {
        if size > limit {
            return Err(AttentionError::Grid { what, size, limit });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_exceeds_an_axis_is_refused_with_its_remedy() {
        let limits = [1 << 31, 65535, 65535];
        assert_eq!(check_grid([1 << 31, 65535, 65535], limits), Ok(()));
        for (cubes, what) in [
            ([(1 << 31) + 1, 1, 1], "the number of tiles"),
            ([1, 65536, 65536], "the number of heads"),
            ([1, 8, 65536], "the number of sequences"),
        ] {
            let error = check_grid(cubes, limits).unwrap_err();
            let text = error.to_string();
            assert!(text.starts_with(what), "{text}");
            assert!(text.ends_with("split the batch over several calls"));
        }
    }
}
