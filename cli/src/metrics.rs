//! `dunlin metrics`: the counters of a running host for Prometheus, as OpenMetrics text over HTTP.
//!
//! They are the counters of `dunlin stats` and `dunlin top`. Each scrape asks the host for them; the tool stores
//! nothing. After the host has ended, the tool reports `dunlin_up 0`, and then finds the next running host.

mod text;

use std::net::{SocketAddr, ToSocketAddrs as _};

use tiny_http::{Header, Method, Request, Response, Server};

use crate::args::MetricsArgs;
use crate::control::Client;
use crate::failure::Failure;
use crate::share;
use crate::stats::Picture;
use text::openmetrics;

/// The type of the text that Prometheus asks for.
const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// The path of the metrics.
const PATH: &str = "/metrics";

pub(crate) fn run(args: &MetricsArgs) -> Result<(), Failure> {
    let mut host = Host { wanted: args.host.host, client: None };
    if args.once {
        let picture = host.picture()?;
        print!("{}", openmetrics(Some(&picture)));
        return Ok(());
    }
    let address = address(&args.listen)?;
    let server = Server::http(address)
        .map_err(|error| Failure::bad_input(format!("option '--listen': cannot listen on {address}: {error}")))?;
    // The port may have been left to the system.
    eprintln!("http://{}{PATH}", server.server_addr());
    for request in server.incoming_requests() {
        answer(request, &mut host);
    }
    Err(Failure::failed(format!("stopped listening on {address}")))
}

fn address(text: &str) -> Result<SocketAddr, Failure> {
    let bad = |why: &str| {
        Failure::bad_input(format!("option '--listen': '{text}': {why}")).help("an address and a port: 127.0.0.1:9742")
    };
    let mut addresses = text.to_socket_addrs().map_err(|error| bad(&error.to_string()))?;
    addresses.next().ok_or_else(|| bad("no address"))
}

/// The host that is asked; another one of the same kind when it has ended.
struct Host {
    wanted: Option<u32>,
    client: Option<Client>,
}

impl Host {
    fn picture(&mut self) -> Result<Picture, Failure> {
        let mut client = match self.client.take() {
            Some(client) => client,
            None => share::attach(self.wanted)?,
        };
        let picture = Picture::take(&mut client)?;
        self.client = Some(client);
        Ok(picture)
    }
}

fn answer(request: Request, host: &mut Host) {
    let path = request.url().split('?').next().unwrap_or_default().to_string();
    let is_read = matches!(request.method(), Method::Get | Method::Head);
    let response = match (is_read, path.as_str()) {
        (false, _) => plain(405, "only GET is supported\n"),
        (true, PATH) => {
            let picture = host.picture();
            if let Err(failure) = &picture {
                eprintln!("{failure}");
            }
            typed(Response::from_string(openmetrics(picture.ok().as_ref())), CONTENT_TYPE)
        }
        (true, "/") => plain(200, "dunlin: /metrics\n"),
        (true, _) => plain(404, "only /metrics exists\n"),
    };
    // The client may have hung up.
    let _ = request.respond(response);
}

type Text = Response<std::io::Cursor<Vec<u8>>>;

fn plain(status: u16, text: &str) -> Text {
    typed(Response::from_string(text).with_status_code(status), "text/plain; charset=utf-8")
}

fn typed(response: Text, of: &str) -> Text {
    match Header::from_bytes("Content-Type", of) {
        Ok(header) => response.with_header(header),
        Err(()) => response,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_has_a_port_and_is_refused_with_help_otherwise() {
        assert_eq!(address("127.0.0.1:0").map(|address| address.port()), Ok(0));
        for bad in ["", "127.0.0.1", "9742", "127.0.0.1:99999"] {
            let failure = address(bad).expect_err("is no address").to_string();
            assert!(failure.contains("option '--listen'") && failure.contains("127.0.0.1:9742"), "{failure}");
        }
    }
}
