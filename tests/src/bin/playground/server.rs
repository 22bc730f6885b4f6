//! The rendered book over HTTP on this machine, with the driver in one page if the query asks for it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Component, Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

const DRIVER: &str = include_str!("driver.js");

/// A server that runs until the program ends.
pub struct Server {
    address: SocketAddr,
    reports: Receiver<String>,
    missing: Arc<Mutex<Vec<String>>>,
}

#[derive(Clone)]
struct Site {
    book: PathBuf,
    page: &'static str,
    cases: Arc<String>,
    reports: Sender<String>,
    missing: Arc<Mutex<Vec<String>>>,
}

/// An answer: type and bytes, or `None` if there is no such file.
type Answer = Option<(&'static str, Vec<u8>)>;

impl Server {
    /// Serves the folder; `page` with the query `?drive` has the driver, which is given `cases`.
    ///
    /// # Errors
    ///
    /// If no port is available.
    pub fn start(book: PathBuf, page: &'static str, cases: String) -> Result<Self, String> {
        let fail = |error: std::io::Error| format!("the server: {error}");
        let listener = TcpListener::bind(("127.0.0.1", 0)).map_err(fail)?;
        let address = listener.local_addr().map_err(fail)?;
        let (sender, reports) = channel();
        let missing = Arc::new(Mutex::new(Vec::new()));
        let site = Site {
            book,
            page,
            cases: Arc::new(cases),
            reports: sender,
            missing: Arc::clone(&missing),
        };
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let site = site.clone();
                // An answer that the browser gave up is no fault; one that it needs is missed in the report.
                std::thread::spawn(move || site.answer(&stream).ok());
            }
        });
        Ok(Self {
            address,
            reports,
            missing,
        })
    }

    /// The URL of the page with the driver, in a frame of this width: windows cannot be as narrow as a phone.
    pub fn url(&self, width: u32) -> String {
        format!("http://{}/drive/frame.html?{width}", self.address)
    }

    /// The driver's report, if it comes within the time.
    pub fn report(&self, within: Duration) -> Option<String> {
        self.reports.recv_timeout(within).ok()
    }

    /// The files that were requested and do not exist.
    pub fn missing(&self) -> Vec<String> {
        self.missing
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

impl Site {
    fn answer(&self, mut stream: &TcpStream) -> std::io::Result<()> {
        let mut reader = BufReader::new(stream);
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let mut words = line.split_whitespace();
        let (method, Some(target)) = (words.next(), words.next()) else {
            // A browser opens connections in advance, and closes those that it does not need.
            return Ok(());
        };
        let target = target.to_owned();
        let post = method == Some("POST");
        let mut length = 0;
        loop {
            let mut header = String::new();
            if reader.read_line(&mut header)? == 0 || header.trim().is_empty() {
                break;
            }
            if let Some((name, value)) = header.split_once(':')
                && name.eq_ignore_ascii_case("content-length")
            {
                length = value.trim().parse().unwrap_or(0);
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body)?;
        let (status, (kind, bytes)) = match self.find(&target, post, body) {
            Some(found) => ("200 OK", found),
            None => {
                let mut missing = self.missing.lock().unwrap_or_else(PoisonError::into_inner);
                missing.push(target);
                ("404 Not Found", ("text/plain", Vec::new()))
            }
        };
        write!(
            stream,
            "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\
             Cache-Control: no-store\r\nConnection: close\r\n\r\n",
            bytes.len()
        )?;
        stream.write_all(&bytes)
    }

    fn find(&self, target: &str, post: bool, body: Vec<u8>) -> Answer {
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let path = path.trim_start_matches('/');
        match (path, post) {
            ("drive/report", true) => {
                let text = String::from_utf8_lossy(&body).into_owned();
                self.reports.send(text).ok()?;
                Some(("text/plain", Vec::new()))
            }
            (_, true) => None,
            ("drive/frame.html", _) => Some(("text/html", self.frame(query).into())),
            ("drive/driver.js", _) => Some(("text/javascript", DRIVER.into())),
            ("drive/cases.json", _) => Some(("application/json", self.cases.as_bytes().to_vec())),
            _ => {
                let (kind, bytes) = self.file(Path::new(path))?;
                if path == self.page && query == "drive" {
                    let html = String::from_utf8_lossy(&bytes);
                    let head = "<head><script src=\"drive/driver.js\"></script>";
                    return Some((kind, html.replacen("<head>", head, 1).into_bytes()));
                }
                Some((kind, bytes))
            }
        }
    }

    /// A document with only the page with the driver.
    fn frame(&self, width: &str) -> String {
        // The document has an icon, so that the browser requests none.
        format!(
            "<!DOCTYPE html><html><head><link rel=\"icon\" href=\"data:,\"></head><body>\
             <iframe src=\"/{}?drive\" width=\"{width}\" height=\"900\"></iframe></body></html>",
            self.page
        )
    }

    fn file(&self, path: &Path) -> Answer {
        let inside = (path.components()).all(|part| matches!(part, Component::Normal(_)));
        let kind = match path.extension()?.to_str()? {
            "html" => "text/html; charset=utf-8",
            "js" => "text/javascript",
            "css" => "text/css",
            "svg" => "image/svg+xml",
            "png" => "image/png",
            "json" => "application/json",
            "woff2" => "font/woff2",
            _ => "application/octet-stream",
        };
        let bytes = inside.then(|| std::fs::read(self.book.join(path)).ok())??;
        Some((kind, bytes))
    }
}
