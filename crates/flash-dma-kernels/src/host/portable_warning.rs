//! The warning that a pass falls back to the portable kernels although its device has tensor cores.

use cubecl::ir::DeviceProperties;
use flash_dma_problem::{Engine, Obstacle, PassKind, PassedOver};
use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

/// Warns once for each device and reason if `engine` is [`Engine::Portable`] for a reason that the caller can change.
/// There is no warning on devices without tensor cores, or if the caller or the environment has excluded them.
pub(crate) fn warn(
    properties: &DeviceProperties,
    pass: PassKind,
    engine: Engine,
    passed_over: &[PassedOver],
) {
    let Some(text) = text(pass, engine, passed_over) else {
        return;
    };
    // The reasons are in the text.
    static WARNED: Mutex<Option<HashSet<(String, String)>>> = Mutex::new(None);
    let name = properties.identity.name.clone();
    let mut warned = WARNED.lock().unwrap_or_else(PoisonError::into_inner);
    let warned = warned.get_or_insert_default();
    if warned.insert((name.clone(), text.clone())) {
        log::warn!("{name}: {text}");
    }
}

/// The text of the warning, if there is one.
fn text(pass: PassKind, engine: Engine, passed_over: &[PassedOver]) -> Option<String> {
    if engine != Engine::Portable {
        return None;
    }
    // Every device with tensor cores has `mma`, which supports what `wgmma` does not.
    let advice = (passed_over.iter())
        .find(|over| over.engine == Engine::Mma)
        .and_then(|over| over.obstacle.advice())?;
    let reasons = passed_over
        .iter()
        .filter(|over| over.obstacle != Obstacle::Device);
    let reasons = reasons.map(|over| format!("{}: {}", over.engine, over.obstacle));
    let reasons: Vec<_> = reasons.collect();
    Some(format!(
        "{pass} runs on {engine}, although the device has tensor cores ({}). To use them, {advice}.",
        reasons.join("; ")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use flash_dma_problem::ElementType;

    fn said(engine: Engine, mma: Obstacle) -> Option<String> {
        let over = |engine, obstacle| PassedOver {
            pass: PassKind::Forward,
            engine,
            obstacle,
        };
        let wgmma = over(Engine::Wgmma, Obstacle::Device);
        text(PassKind::Forward, engine, &[wgmma, over(Engine::Mma, mma)])
    }

    #[test]
    fn a_warning_names_the_cause_and_what_to_change() {
        let f32 = Obstacle::Element(ElementType::F32);
        assert_eq!(
            said(Engine::Portable, f32).expect("a warning"),
            "the forward pass runs on the portable kernels, although the device has tensor cores (the mma kernels: \
             there is no kernel for f32). To use them, cast q, k and v to bf16 or f16."
        );
        assert_eq!(said(Engine::Wgmma, f32), None);
    }

    #[test]
    fn nothing_is_said_where_nobody_can_change_it() {
        let forced = Obstacle::Forced(Engine::Portable);
        for reason in [Obstacle::Device, Obstacle::Variable, forced] {
            assert_eq!(said(Engine::Portable, reason), None, "{reason}");
        }
    }
}
