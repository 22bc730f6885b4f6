//! Devices of CubeCL, and their clocks.

use cubecl::client::Client;
use cubecl::future::block_on;

/// The client of a runtime by name, if it is compiled in and the machine has the device.
pub fn client(runtime: &str) -> Option<Client> {
    let device = match runtime {
        #[cfg(feature = "cpu")]
        "cpu" => cubecl::Device::cpu(),
        #[cfg(feature = "cuda")]
        "cuda" => cubecl::Device::cuda(0),
        #[cfg(feature = "wgpu")]
        "wgpu" => cubecl::Device::wgpu(cubecl::device::WgpuDeviceKind::DefaultDevice),
        _ => return None,
    };
    Some(device.ok()?.client())
}

/// The device and the runtime, as in the rows.
pub fn name(client: &Client) -> String {
    format!("{} ({})", client.properties().identity.name, client.name())
}

/// Waits until all launches have run. Panics if something failed.
pub fn sync(client: &Client) {
    block_on(client.sync()).expect("the device works");
}

/// Device time of the launches of `f`, in milliseconds. Panics if the device cannot be timed, or nothing was
/// launched.
pub fn time(client: &Client, f: impl FnOnce() + Send) -> f64 {
    let ((), duration) = client.profile(f, "phase").expect("the device can be timed");
    let ticks = block_on(duration.resolve()).expect("something was launched");
    ticks.duration().as_secs_f64() * 1e3
}
