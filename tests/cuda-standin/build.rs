//! Gives the shared library the driver's SONAME, so that a program that opens `libcuda.so.1` after it was
//! loaded by path gets this one; and a search path of its own, by which it takes the driver's other name.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
        // An RPATH (old tags) is searched before LD_LIBRARY_PATH and before the system's folders.
        println!("cargo::rustc-cdylib-link-arg=-Wl,--disable-new-dtags,-rpath,$ORIGIN/cuda-standin-names");
    }
}
