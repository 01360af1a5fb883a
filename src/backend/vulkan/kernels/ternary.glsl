// The formats of src/ggml/ternary.rs: the values -1, 0 and 1 times a scale.

// Five values in a byte, as digits of base three of a fraction. 32 bytes have five values, sixteen have five, and four have
// four; the first values of all bytes come first. So the sixteen have runs 5 and 6 and half of run 7, and the four the rest.
uint tq1_0(uint block, uint run, uint at) {
    uint place = at, digit = run;
    if (run > 4u) {
        const uint of_sixteen = (run - 5u) * RUN + at, of_four = of_sixteen - 80u;
        const bool last = of_sixteen >= 80u;
        place = last ? 48u + (of_four & 3u) : 32u + (of_sixteen & 15u);
        digit = last ? of_four >> 2 : of_sixteen >> 4;
    }
    // The powers of three.
    const uint fraction = byte_at(block + place) * entry(uvec2(0x1b090301u, 0x51u), digit) & 0xffu;
    return times(half_at(block + 52u), int(fraction * 3u >> 8) - 1);
}

// Four values in a byte; each 32 bytes hold four runs.
uint tq2_0(uint block, uint run, uint at) {
    return times(half_at(block + 64u), int(byte_at(block + (run >> 2) * RUN + at) >> ((run & 3u) << 1) & 3u) - 1);
}
