//! A headless browser with its own profile, ended with the value.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A running browser.
pub struct Browser {
    child: Child,
    /// The folder of its profile, with the file of its messages.
    dir: PathBuf,
}

impl Browser {
    /// Opens `url`.
    ///
    /// # Errors
    ///
    /// If the program does not start.
    pub fn start(program: &Path, url: &str) -> Result<Self, String> {
        let dir = std::env::temp_dir().join(format!("playground-{}", std::process::id()));
        let fail = |error: std::io::Error| format!("{}: {error}", program.display());
        fs::create_dir_all(&dir).map_err(fail)?;
        let messages = File::create(dir.join("messages")).map_err(fail)?;
        let child = Command::new(program)
            .args(["--headless=new", "--no-sandbox", "--disable-gpu"])
            .args(["--no-first-run", "--disable-background-networking"])
            .arg(format!("--user-data-dir={}", dir.display()))
            .arg("--window-size=1300,1000")
            .arg(url)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(messages)
            .spawn()
            .map_err(fail)?;
        Ok(Self { child, dir })
    }

    /// Waits until `poll`, which pauses for the given time, returns something.
    ///
    /// # Errors
    ///
    /// If the browser ends before, or after the limit: with the last of its messages.
    pub fn wait_for<T>(
        &mut self,
        limit: Duration,
        poll: impl Fn(Duration) -> Option<T>,
    ) -> Result<T, String> {
        let start = Instant::now();
        while start.elapsed() < limit {
            if let Some(found) = poll(Duration::from_millis(100)) {
                return Ok(found);
            }
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(format!("the browser ended: {status}\n{}", self.messages()));
            }
        }
        let messages = self.messages();
        Err(format!("no report after {limit:?}\n{messages}"))
    }

    fn messages(&self) -> String {
        let text = fs::read(self.dir.join("messages")).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(10)..].join("\n")
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
        // Its other processes end a little later, and write until then.
        for _ in 0..50 {
            if fs::remove_dir_all(&self.dir).is_ok() || !self.dir.exists() {
                return;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        eprintln!("{} is left", self.dir.display());
    }
}
