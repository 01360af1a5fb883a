//! What streams do, as a trace that a browser shows.

use std::fs::File;
use std::path::Path;

use tensor_offload::{Error, Result};
use tracing_chrome::{ChromeLayerBuilder, FlushGuard, TraceStyle};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::{Layer, SubscriberExt};

/// Writes the library's spans to a file in Chrome's format, from now on until the guard is dropped.
///
/// # Errors
/// When the file cannot be written, or the program has a subscriber already.
pub(crate) fn to_file(path: &Path) -> Result<FlushGuard> {
    let create = |source| Error::Io { path: path.to_owned(), action: "write", source };
    let file = File::create(path).map_err(create)?;
    // A copy of a device's ends where nobody runs a thread for it, so spans are shown from open to closed.
    let builder = ChromeLayerBuilder::new().writer(file).include_args(true).trace_style(TraceStyle::Async);
    let (layer, guard) = builder.build();
    let ours = Targets::new().with_target("tensor_offload", tracing_subscriber::filter::LevelFilter::TRACE);
    let subscriber = tracing_subscriber::registry().with(layer.with_filter(ours));
    tracing::subscriber::set_global_default(subscriber)
        .map_err(|taken| Error::Invalid { reason: format!("no trace can be written: {taken}") })?;
    Ok(guard)
}
