//! As much of HTTP/1.1 as a server of one address needs. A connection is closed behind its answer, which ends it.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use super::Line;

/// The most bytes of a request's head.
const HEAD: u64 = 16 << 10;

/// The most bytes of a request's body.
const BODY: usize = 1 << 20;

/// How long a client may let the server wait, for each read and write.
const PATIENCE: Duration = Duration::from_secs(30);

/// A client.
pub struct Connection {
    stream: BufReader<TcpStream>,
}

impl Connection {
    /// A client that has said nothing yet.
    pub fn new(stream: TcpStream) -> Self {
        // Without them a client that is silent keeps its thread, which is all.
        stream.set_read_timeout(Some(PATIENCE)).ok();
        stream.set_write_timeout(Some(PATIENCE)).ok();
        stream.set_nodelay(true).ok();
        Self {
            stream: BufReader::new(stream),
        }
    }

    /// The body of `POST /generate`.
    ///
    /// # Errors
    ///
    /// The status and the reason to refuse the request with.
    pub fn read(&mut self) -> Result<Vec<u8>, (u16, String)> {
        let lines = self.head()?;
        let mut first = lines.first().map_or("", String::as_str).split(' ');
        match (first.next(), first.next()) {
            (Some("POST"), Some("/generate")) => {}
            (_, Some("/generate")) => return Err((405, "the method must be POST".into())),
            _ => return Err((404, "the address is /generate".into())),
        }
        let field = |name: &str| {
            let values = lines.iter().skip(1).filter_map(|line| line.split_once(':'));
            let mut values = values.filter(|(field, _)| field.eq_ignore_ascii_case(name));
            values.next().map(|(_, value)| value.trim())
        };
        let length = field("content-length").and_then(|length| length.parse::<usize>().ok());
        let Some(length) = length else {
            return Err((411, "the request needs a Content-Length".into()));
        };
        if length > BODY {
            return Err((413, format!("the request has more than {BODY} bytes")));
        }
        if field("expect").is_some_and(|value| value.eq_ignore_ascii_case("100-continue")) {
            (self
                .stream
                .get_mut()
                .write_all(b"HTTP/1.1 100 Continue\r\n\r\n"))
            .map_err(broken)?;
        }
        let mut body = vec![0; length];
        self.stream.read_exact(&mut body).map_err(broken)?;
        Ok(body)
    }

    /// The lines before the empty one.
    fn head(&mut self) -> Result<Vec<String>, (u16, String)> {
        let (mut lines, mut left) = (Vec::new(), HEAD);
        loop {
            let mut line = String::new();
            let read = (&mut self.stream).take(left).read_line(&mut line);
            left -= read.map_err(broken)? as u64;
            let Some(whole) = line.strip_suffix('\n') else {
                return Err((400, "the head of the request does not end".into()));
            };
            match whole.trim_end_matches('\r') {
                "" => return Ok(lines),
                line => lines.push(line.to_owned()),
            }
        }
    }

    /// Sends lines until there are no more.
    ///
    /// # Errors
    ///
    /// If the client has gone.
    pub fn stream(&mut self, lines: Receiver<Line>) -> io::Result<()> {
        self.head_of(200, "application/x-ndjson")?;
        for line in lines {
            let mut text = serde_json::to_string(&line)?;
            text.push('\n');
            self.stream.get_mut().write_all(text.as_bytes())?;
        }
        Ok(())
    }

    /// Refuses a request.
    ///
    /// # Errors
    ///
    /// If the client has gone.
    pub fn refuse(&mut self, status: u16, reason: &str) -> io::Result<()> {
        self.head_of(status, "application/json")?;
        let text = serde_json::to_string(&Line::Error(reason.into()))?;
        self.stream.get_mut().write_all(text.as_bytes())
    }

    fn head_of(&mut self, status: u16, content: &str) -> io::Result<()> {
        let meaning = match status {
            200 => "OK",
            404 => "Not Found",
            405 => "Method Not Allowed",
            411 => "Length Required",
            413 => "Content Too Large",
            503 => "Service Unavailable",
            500 => "Internal Server Error",
            _ => "Bad Request",
        };
        let head = format!(
            "HTTP/1.1 {status} {meaning}\r\nContent-Type: {content}\r\nConnection: close\r\n\r\n"
        );
        self.stream.get_mut().write_all(head.as_bytes())
    }
}

/// What is said to a client whose request cannot be read to its end.
fn broken(error: io::Error) -> (u16, String) {
    (400, format!("the request ends early: {error}"))
}
