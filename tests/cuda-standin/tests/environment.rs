//! A program that knows nothing of the stand-in runs over it, by the environment alone.

use std::process::{Command, Stdio};

use cuda_standin::{Config, Driver, Report, library_path};
use cudarc::driver::result;

/// The program: finds the driver by its name, as on any machine.
#[test]
#[ignore = "run by the test below, in an environment of its own"]
fn program() {
    let context = cudarc::driver::CudaContext::new(1).unwrap();
    assert_eq!(context.total_mem().unwrap(), 3 << 20);
    let stream = context.default_stream();
    let slice = stream.clone_htod(&[1_u8, 2, 3]).unwrap();
    assert_eq!(stream.clone_dtoh(&slice).unwrap(), [1, 2, 3]);
    // SAFETY: the context is current; the memory is left behind on purpose.
    unsafe { result::malloc_sync(1000).unwrap() };
    std::mem::forget(context);
}

/// The same, ended by a thread that has made calls: its own data are gone when the report is written.
#[test]
#[ignore = "run by the test below, in an environment of its own"]
fn program_that_exits() {
    program();
    std::process::exit(0);
}

#[test]
fn a_program_is_configured_and_reports_by_the_environment() {
    // Loading it once makes the folder that holds the driver's names.
    Driver::load().unwrap();
    let names = library_path().unwrap().with_file_name("cuda-standin-names");
    let named = |process: &str| std::env::temp_dir().join(format!("standin-{}-{process}.json", std::process::id()));
    let config = serde_json::to_string(&Config::with_devices(&[1 << 20, 3 << 20])).unwrap();
    for name in ["program", "program_that_exits"] {
        let program = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--ignored"])
            .env("LD_LIBRARY_PATH", &names)
            .env("CUDA_STANDIN_CONFIG", &config)
            .env("CUDA_STANDIN_REPORT", named("%p"))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let report = named(&program.id().to_string());
        let output = program.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        let seen: Report = serde_json::from_slice(&std::fs::read(&report).unwrap()).unwrap();
        std::fs::remove_file(&report).unwrap();
        seen.assert_lawful();
        assert_eq!((seen.live_allocations, seen.live_bytes, seen.live_contexts), (1, 1000, 1));
    }
}
