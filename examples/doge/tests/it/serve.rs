//! The server, on a free port.

use crate::common::{DOGE, letter_of};
use crate::testing::Scratch;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::thread;

/// A server that ends with the test.
struct Server {
    process: Child,
    address: String,
}

impl Server {
    fn new(model: &str, options: &[&str]) -> Self {
        let mut process = Command::new(DOGE.0)
            .args(["serve", "--weights", model, "--address", "127.0.0.1:0"])
            .args(options)
            .stdout(Stdio::piped())
            .spawn()
            .expect("cargo has built the program");
        let mut line = String::new();
        let output = process.stdout.take().expect("it has one");
        BufReader::new(output)
            .read_line(&mut line)
            .expect("it says where it listens");
        let address = line.trim_end().strip_prefix("listening on ");
        let address = address.expect("an address").to_owned();
        Self { process, address }
    }

    fn connect(&self) -> TcpStream {
        TcpStream::connect(&self.address).expect("it listens")
    }

    /// Status and body of an answer.
    fn ask(&self, request: &str) -> (u16, String) {
        let mut connection = self.connect();
        connection
            .write_all(request.as_bytes())
            .expect("it listens");
        let mut answer = String::new();
        connection.read_to_string(&mut answer).expect("it answers");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
        let status = head.split(' ').nth(1).map(str::parse);
        (
            status.expect("a status").expect("a number"),
            body.to_owned(),
        )
    }

    /// Text after a prompt, and how it ended.
    fn generate(&self, body: &str) -> (String, Value) {
        let (status, body) = self.ask(&post(body));
        assert_eq!(status, 200, "{body}");
        let lines = body.lines().map(serde_json::from_str);
        let mut lines: Vec<Value> = lines.map(|line| line.expect("a line of JSON")).collect();
        let end = lines.pop().expect("an end")["end"].take();
        let text = lines.iter().map(|line| line["text"].as_str());
        (text.map(|text| text.expect("text")).collect(), end)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

fn post(body: &str) -> String {
    format!(
        "POST /generate HTTP/1.1\r\nHost: here\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// Text of the program `doge` after a prompt.
fn written(model: &str, prompt: &str, tokens: usize) -> String {
    let line = format!("write --weights {model} --max-new {tokens} --prompt");
    let text = DOGE.printed(&line, &[prompt]);
    text.strip_suffix('\n').expect("a line").to_owned()
}

#[test]
fn requests_that_wait_are_answered_together_and_as_if_alone() {
    let scratch = Scratch::new();
    let model = scratch.model("model", 5);
    let long = "a long prompt, read in pieces ".repeat(8);
    let asked = [("x", 30), ("Once upon", 12), (long.as_str(), 20)];
    for options in [&["--chunk", "64"][..], &["--lookup"]] {
        // Three requests fill the batch, so nobody waits that long.
        let options = [&["--batch", "3", "--gather", "60000"], options].concat();
        let server = Server::new(&model, &options);
        thread::scope(|scope| {
            for (prompt, tokens) in asked {
                let (server, model) = (&server, &model);
                scope.spawn(move || {
                    let body = json!({"prompt": prompt, "max_new": tokens});
                    let (text, end) = server.generate(&body.to_string());
                    assert_eq!(text, written(model, prompt, tokens), "{prompt}");
                    let expected = json!({"reason": "length", "tokens": tokens, "batch": 3});
                    assert_eq!(end, expected);
                });
            }
        });
    }
}

#[test]
fn a_text_ends_where_its_client_asks_for_it() {
    let scratch = Scratch::new();
    let model = scratch.model("model", 6);
    let server = Server::new(&model, &["--max-new", "24"]);
    // The server's limit is lower.
    let (whole, end) = server.generate(r#"{"prompt": "x", "max_new": 1000}"#);
    assert_eq!(end, json!({"reason": "length", "tokens": 24, "batch": 1}));
    assert_eq!(whole, written(&model, "x", 24));

    let stop = letter_of(&whole).to_string();
    let body = json!({"prompt": "x", "stop": ["no such text", stop]});
    let (text, end) = server.generate(&body.to_string());
    assert_eq!(end["reason"], "stop");
    let expected = whole.find(&stop).expect("it is in the text") + stop.len();
    assert_eq!(text, whole[..expected]);

    // A client that leaves ends only its own text.
    let mut connection = server.connect();
    connection
        .write_all(post(r#"{"prompt": "gone"}"#).as_bytes())
        .expect("it listens");
    drop(connection);
    assert_eq!(server.generate(r#"{"prompt": "x"}"#).0, whole);
}

#[test]
fn requests_that_mean_nothing_are_refused() {
    let scratch = Scratch::new();
    let model = scratch.model("model", 7);
    let server = Server::new(&model, &[]);
    let long = json!({"prompt": "x".repeat(500)}).to_string();
    let refuses = |request: &str, status: u16, reason: &str| {
        let (answered, body) = server.ask(request);
        assert_eq!(answered, status, "{request}: {body}");
        let line: Value = serde_json::from_str(&body).expect("a line of JSON");
        let said = line["error"].as_str().expect("a reason");
        assert!(said.contains(reason), "{body}");
    };
    for (body, reason) in [
        ("{}", "missing field `prompt`"),
        (r#"{"prompt": "x", "top": 1}"#, "unknown field `top`"),
        (r#"{"prompt": "x", "max_new": 0}"#, "max_new is 0"),
        (r#"{"prompt": "x", "stop": [""]}"#, "a stop is empty"),
        (&long, "501 tokens, and 256 to follow"),
    ] {
        refuses(&post(body), 400, reason);
    }
    for (head, status, reason) in [
        ("GET /generate HTTP/1.1", 405, "POST"),
        ("GET / HTTP/1.1", 404, "/generate"),
        ("POST /generate HTTP/1.1", 411, "Content-Length"),
        (
            "POST /generate HTTP/1.1\r\nContent-Length: 99999999",
            413,
            "bytes",
        ),
        ("nonsense", 400, "invalid"),
    ] {
        refuses(&format!("{head}\r\n\r\n"), status, reason);
    }
    // It still answers.
    let (_, end) = server.generate(r#"{"prompt": "x", "max_new": 2}"#);
    assert_eq!(end["tokens"], 2);

    let line = format!("serve --weights {model}");
    let error = DOGE.refused(&line, &["--batch", "0"]);
    assert!(error.contains("--batch must be at least 1"), "{error}");
    let error = DOGE.refused(&line, &["--top-p", "2"]);
    assert!(error.contains("top_p"), "{error}");
    let error = DOGE.refused(&line, &["--address", "nowhere"]);
    assert!(error.starts_with("nowhere: "), "{error}");
}
