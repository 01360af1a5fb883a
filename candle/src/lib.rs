//! Streams the weights of [candle](https://github.com/huggingface/candle) programs with
//! [`tensor_offload`]: a model larger than one device runs block by block, each block's weights copied to the device in time
//! for its turn.
