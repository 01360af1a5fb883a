//! Gives the shared library the SONAME of libcufile, so that a program that opens `libcufile.so.0` after it was loaded by
//! path gets this one.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcufile.so.0");
    }
}
