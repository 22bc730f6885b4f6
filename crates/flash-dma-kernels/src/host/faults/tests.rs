use super::*;
use crate::testing::{client, read_u32};

/// Writes the second half of eight words; if `broken`, it does not compile on any runtime.
#[cube(launch_unchecked)]
fn half_kernel(out: &mut [u32], #[comptime] broken: bool) {
    if comptime!(broken) {
        let x: u32;
        gpu_asm!("this.is.no.instruction {};", out(_) x, options(nomem));
        out[ABSOLUTE_POS] = x;
    } else {
        out[4 + ABSOLUTE_POS] = 7;
    }
}

fn launch(client: &Client, out: &TensorBinding, broken: bool) {
    // SAFETY: `out` has 8 elements.
    unsafe {
        half_kernel::launch_unchecked(
            client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(4),
            out.clone().into_buffer_arg(),
            broken,
        );
    }
}

fn result(client: &Client) -> (Handle, TensorBinding) {
    let handle = client.create_from_slice(u32::as_bytes(&[0; 8]));
    // SAFETY: the buffer holds the eight words of the shape.
    let tensor =
        unsafe { TensorBinding::from_raw_parts(handle.clone(), [1].into(), [8usize].into()) };
    (handle, tensor)
}

#[test]
fn a_kernel_that_does_not_compile_fails_by_the_name_of_its_operation() {
    let client = client();
    let (handle, out) = result(&client);
    launch(&client, &out, true);
    let error = check(&client, "this test", [&handle]).unwrap_err();
    let AttentionError::DeviceFailed { operation, reason } = &error else {
        panic!("{error:?}");
    };
    assert_eq!(*operation, "this test");
    let text = error.to_string();
    let begins = text.starts_with("this test failed on the device: ");
    assert!(begins, "{text}");
    assert!(!reason.is_empty());
    assert!(client.read_one(handle).is_err());
    let (handle, out) = result(&client);
    launch(&client, &out, false);
    assert_eq!(check(&client, "this test", [&handle]), Ok(()));
    assert_eq!(read_u32(&client, out), [0, 0, 0, 0, 7, 7, 7, 7]);
}

/// The reason for the seal. If this test fails, CubeCL handles the case itself and the seal can be removed.
#[test]
fn a_failure_is_forgotten_when_another_part_is_written() {
    let client = client();
    let (handle, out) = result(&client);
    launch(&client, &out, true);
    launch(&client, &out, false);
    assert_eq!(check(&client, "this test", [&handle]), Ok(()));
}

#[test]
fn a_sealed_result_remembers_the_part_that_failed() {
    let client = client();
    for broken in 0..3 {
        let (handle, out) = result(&client);
        let seal = Seal::new(&client);
        for part in 0..3 {
            launch(&client, &out, part == broken);
            seal.note(&out);
        }
        seal.close(&out);
        assert!(check(&client, "this test", [&handle]).is_err(), "{broken}");
    }
}

#[test]
fn a_seal_changes_nothing_of_a_result_that_was_written() {
    let client = client();
    let (handle, out) = result(&client);
    let seal = Seal::new(&client);
    launch(&client, &out, false);
    seal.note(&out);
    seal.close(&out);
    assert_eq!(check(&client, "this test", [&handle]), Ok(()));
    assert_eq!(read_u32(&client, out), [0, 0, 0, 0, 7, 7, 7, 7]);
}
