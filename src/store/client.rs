//! The HTTP client beneath a store of a URL, which remembers what went wrong.
//!
//! object_store asks again after most failures, for as long as it may, and tells only the last one. A store that has never answered is
//! more likely called by a wrong name than busy, so that is given up soon; and whoever gives up waiting learns what was waited for.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService, ReqwestConnector,
};

use super::fault;

/// How often a store that has never answered is asked.
const FIRST: u32 = 3;

/// What a client has met.
#[derive(Debug, Default)]
pub(super) struct Trouble {
    answered: AtomicBool,
    failures: AtomicU32,
    /// The last request that was to be made again, until one is not.
    last: Mutex<Option<String>>,
}

impl Trouble {
    /// What came of the last request, if it failed.
    pub(super) fn last(&self) -> Option<String> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn note(&self, trouble: Option<String>) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = trouble;
    }
}

/// Makes such clients.
#[derive(Debug)]
pub(super) struct Connector(pub(super) Arc<Trouble>);

#[derive(Debug)]
struct Client {
    inner: HttpClient,
    trouble: Arc<Trouble>,
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let inner = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(Client { inner, trouble: Arc::clone(&self.0) }))
    }
}

impl Client {
    async fn ask(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let Trouble { answered, failures, .. } = &*self.trouble;
        match self.inner.execute(request).await {
            Ok(answer) => {
                answered.store(true, Ordering::Relaxed);
                let status = answer.status();
                let busy = status.is_server_error() || status.as_u16() == 429;
                self.trouble.note(busy.then(|| format!("the store answers {status}")));
                Ok(answer)
            }
            Err(error) => {
                self.trouble.note(Some(fault::unreachable(&error)));
                let often = failures.fetch_add(1, Ordering::Relaxed) + 1 >= FIRST;
                match often && !answered.load(Ordering::Relaxed) {
                    // Of a kind that is not tried again.
                    true => Err(HttpError::new(HttpErrorKind::Unknown, error)),
                    false => Err(error),
                }
            }
        }
    }
}

impl HttpService for Client {
    fn call<'s, 'f>(
        &'s self,
        request: HttpRequest,
    ) -> Pin<Box<dyn Future<Output = Result<HttpResponse, HttpError>> + Send + 'f>>
    where
        's: 'f,
        Self: 'f,
    {
        Box::pin(self.ask(request))
    }
}
