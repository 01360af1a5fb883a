//! URLs of object stores.

use std::sync::{Arc, Once};
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::http::HttpBuilder;
use object_store::{BackoffConfig, ClientConfigKey, ClientOptions, ObjectStore, RetryConfig};

use super::client::{Connector, Trouble};
use crate::error::{Error, Result};

/// The stores that URLs are of.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Scheme {
    S3,
    Gcs,
    Azure,
    Http,
}

const SCHEMES: [(&str, Scheme); 8] = [
    ("s3", Scheme::S3),
    ("s3a", Scheme::S3),
    ("gs", Scheme::Gcs),
    ("az", Scheme::Azure),
    ("abfs", Scheme::Azure),
    ("abfss", Scheme::Azure),
    ("http", Scheme::Http),
    ("https", Scheme::Http),
];

/// Whether a text is the URL of an object store, and no path of a file: whether it begins with a word and `://`.
pub fn is_url(text: &str) -> bool {
    text.split_once("://").is_some_and(|(scheme, _)| {
        scheme.len() > 1 && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte))
    })
}

/// The store that has a URL.
pub(super) struct Store {
    pub(super) store: Arc<dyn ObjectStore>,
    /// What all URLs of it begin with.
    pub(super) base: String,
    /// Whether they are encoded as URLs of the web are.
    pub(super) encoded: bool,
    /// What its client has met.
    pub(super) trouble: Arc<Trouble>,
}

/// The store that has a URL.
///
/// # Errors
/// [`Error::Invalid`], without the URL where that may have credentials.
pub(super) fn store(url: &str) -> Result<Store> {
    let schemes = || SCHEMES.map(|(name, _)| format!("{name}://")).join(", ");
    let (name, rest) = url.split_once("://").ok_or_else(|| Error::invalid(format!("`{url}` is no URL")))?;
    let known = SCHEMES.iter().find(|(scheme, _)| name.eq_ignore_ascii_case(scheme));
    let Some((_, scheme)) = known else {
        return Err(Error::invalid(format!("no store is known for `{name}://`; those known are {}", schemes())));
    };
    if let Some(why) = secret_in(url) {
        return Err(Error::invalid(why));
    }
    let authority = rest.split('/').next().unwrap_or_default();
    if authority.is_empty() {
        return Err(Error::invalid(format!(
            "`{url}` names no {}",
            if *scheme == Scheme::Http { "host" } else { "bucket" }
        )));
    }
    static PROVIDER: Once = Once::new();
    // For TLS. Where the process has chosen one already, that one is used.
    PROVIDER.call_once(|| drop(rustls::crypto::ring::default_provider().install_default()));
    let base = format!("{name}://{authority}/");
    if *scheme == Scheme::S3
        && let Some(name) = S3_ENDPOINTS.iter().find(|name| is_plain(name))
        && !std::env::var("AWS_ALLOW_HTTP")
            .is_ok_and(|allowed| ["1", "on", "true", "yes", "y"].contains(&&*allowed.to_lowercase()))
    {
        return Err(Error::invalid(format!(
            "{name} is http://, without TLS; set AWS_ALLOW_HTTP=true if that is meant"
        )));
    }
    let trouble = Arc::new(Trouble::default());
    let store = build(*scheme, &base, Connector(Arc::clone(&trouble))).map_err(|error| {
        Error::invalid(format!("the store of {base} cannot be used with the settings in the environment: {error}"))
    })?;
    Ok(Store { store, base, encoded: *scheme == Scheme::Http, trouble })
}

/// Whether a variable has a URL without TLS.
fn is_plain(name: &str) -> bool {
    std::env::var(name).is_ok_and(|url| url.to_ascii_lowercase().starts_with("http://"))
}

/// Why a URL is not taken, if credentials may be in it. The text has none of it.
pub(super) fn secret_in(url: &str) -> Option<&'static str> {
    let (name, rest) = url.split_once("://")?;
    let authority = rest.split('/').next().unwrap_or_default();
    // Those of Azure have a container there: `abfss://CONTAINER@ACCOUNT.HOST/`.
    if authority.contains(':') && authority.contains('@') || authority.contains('@') && !name.starts_with('a') {
        return Some(
            "a URL with a user's name or a password in it is not taken, since it would be in every message; set them in the environment",
        );
    }
    rest.contains(['?', '#']).then_some(
        "a URL with a query, such as a signed one, is not taken, since it names one object and a model has several; set credentials \
         in the environment, and open s3://BUCKET/..., gs://... or az://...",
    )
}

/// How stubbornly a store is asked again. The storage's deadline ends it before.
fn retry(seconds: u64) -> RetryConfig {
    let backoff =
        BackoffConfig { init_backoff: Duration::from_millis(100), max_backoff: Duration::from_secs(5), base: 3.0 };
    RetryConfig { backoff, max_retries: 100, retry_timeout: Duration::from_secs(seconds) }
}

/// How long a whole answer may take: the storage's deadline is for bytes that do not come.
const ANSWER: &str = "1 hour";

/// After how long without a byte a connection is given up for another one.
const SILENCE: &str = "20 seconds";

/// What says in the environment where S3 is.
const S3_ENDPOINTS: [&str; 3] = ["AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"];

/// What says in the environment who asks S3. Without any of it, the machine is asked, which fails soon where it is none of Amazon's.
const S3_CREDENTIALS: [&str; 5] = [
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
];

fn build(scheme: Scheme, base: &str, connector: Connector) -> object_store::Result<Arc<dyn ObjectStore>> {
    let (answer, silence) = (ClientConfigKey::Timeout, ClientConfigKey::ReadTimeout);
    Ok(match scheme {
        Scheme::S3 => {
            let known = S3_CREDENTIALS.iter().any(|name| std::env::var_os(name).is_some());
            let builder = AmazonS3Builder::from_env()
                .with_http_connector(connector)
                .with_config(AmazonS3ConfigKey::Client(answer), ANSWER)
                .with_config(AmazonS3ConfigKey::Client(silence), SILENCE)
                .with_retry(retry(if known { 180 } else { 5 }));
            Arc::new(builder.with_url(base).build()?)
        }
        Scheme::Gcs => {
            let builder = GoogleCloudStorageBuilder::from_env()
                .with_http_connector(connector)
                .with_config(GoogleConfigKey::Client(answer), ANSWER)
                .with_config(GoogleConfigKey::Client(silence), SILENCE)
                .with_retry(retry(180));
            Arc::new(builder.with_url(base).build()?)
        }
        Scheme::Azure => {
            let builder = MicrosoftAzureBuilder::from_env()
                .with_http_connector(connector)
                .with_config(AzureConfigKey::Client(answer), ANSWER)
                .with_config(AzureConfigKey::Client(silence), SILENCE)
                .with_retry(retry(180));
            Arc::new(builder.with_url(base).build()?)
        }
        Scheme::Http => {
            let plain = base.split("://").next().is_some_and(|name| name.eq_ignore_ascii_case("http"));
            let options =
                ClientOptions::new().with_allow_http(plain).with_config(answer, ANSWER).with_config(silence, SILENCE);
            Arc::new(
                HttpBuilder::new()
                    .with_http_connector(connector)
                    .with_url(base)
                    .with_client_options(options)
                    .with_retry(retry(180))
                    .build()?,
            )
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_told_from_paths() {
        for url in ["s3://bucket/key", "https://host/x", "unknown://x"] {
            assert!(is_url(url), "{url}");
        }
        for path in ["", "model", "C:\\models", "c://models", "a/b://c", "://x", "/s3://x"] {
            assert!(!is_url(path), "{path}");
        }
    }

    #[test]
    fn what_cannot_be_opened_is_said_without_a_secret() {
        let refused = |url: &str| store(url).map(|_| ()).unwrap_err().to_string();
        assert!(refused("ftp://host/x").contains("s3://"), "{}", refused("ftp://host/x"));
        assert!(refused("s3:///key").contains("names no bucket"));
        for url in ["https://user:hunter2@host/x", "https://host/x?X-Amz-Signature=hunter2", "s3://id:hunter2@bucket/x"]
        {
            let said = refused(url);
            assert!(!said.contains("hunter2") && !said.is_empty(), "{said}");
        }
        let Store { base, encoded, .. } = store("http://127.0.0.1:1/a%20b/model.safetensors").unwrap();
        assert_eq!((base.as_str(), encoded), ("http://127.0.0.1:1/", true));
    }
}
