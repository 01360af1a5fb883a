/* What candle calls of cuBLAS and cuRAND to open a device and to multiply matrices of f32, over any driver: so that candle runs
 * over a stand-in for the driver, which knows neither library. The operands are copied to the host and the product back, on
 * the stream of the handle, so the driver sees what is read and written, and in which order. */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

typedef uint64_t address;
extern int cuMemcpyDtoHAsync_v2(void *, address, size_t, void *);
extern int cuMemcpyHtoDAsync_v2(address, const void *, size_t, void *);
extern int cuStreamSynchronize(void *);

struct handle {
    void *stream;
};

int cublasCreate_v2(struct handle **handle) { return (*handle = calloc(1, sizeof **handle)) ? 0 : 3; }
int cublasDestroy_v2(struct handle *handle) { return free(handle), 0; }
int cublasSetStream_v2(struct handle *handle, void *stream) { return handle->stream = stream, 0; }

int curandCreateGenerator(void **generator, int kind) { return (void)kind, *generator = NULL, 0; }
int curandDestroyGenerator(void *generator) { return (void)generator, 0; }
int curandSetStream(void *generator, void *stream) { return (void)generator, (void)stream, 0; }
int curandSetPseudoRandomGeneratorSeed(void *generator, unsigned long long seed) { return (void)generator, (void)seed, 0; }

/* A matrix of the device, column by column, `lead` numbers from one to the next. */
struct matrix {
    float *values;
    int64_t lead;
    int transposed;
};

static float at(struct matrix m, int row, int column) {
    return m.transposed ? m.values[row * m.lead + column] : m.values[column * m.lead + row];
}

static int read_matrix(struct matrix *m, address from, int rows, int columns, int lead, int transposed, void *stream) {
    int64_t count = transposed ? (int64_t)(rows - 1) * lead + columns : (int64_t)(columns - 1) * lead + rows;
    m->lead = lead, m->transposed = transposed;
    m->values = malloc(count * sizeof(float));
    return m->values && !cuMemcpyDtoHAsync_v2(m->values, from, count * sizeof(float), stream) && !cuStreamSynchronize(stream);
}

int cublasGemmStridedBatchedEx(struct handle *handle, int transa, int transb, int m, int n, int k, const float *alpha,
                               address a, int a_type, int lda, long long stride_a, address b, int b_type, int ldb,
                               long long stride_b, const float *beta, address c, int c_type, int ldc, long long stride_c,
                               int batches, int compute, int algorithm) {
    (void)compute, (void)algorithm;
    /* Numbers of f32 (0), a product that is not added to anything, without gaps between its columns. */
    if (a_type || b_type || c_type || *beta != 0 || ldc != m) return 15;
    for (int batch = 0; batch < batches; batch++) {
        struct matrix left = {0}, right = {0};
        float *product = malloc((size_t)m * n * sizeof(float));
        int ok = product && read_matrix(&left, a + batch * stride_a * sizeof(float), m, k, lda, transa, handle->stream) &&
                 read_matrix(&right, b + batch * stride_b * sizeof(float), k, n, ldb, transb, handle->stream);
        for (int column = 0; ok && column < n; column++)
            for (int row = 0; row < m; row++) {
                float sum = 0;
                for (int i = 0; i < k; i++) sum += at(left, row, i) * at(right, i, column);
                product[(size_t)column * m + row] = *alpha * sum;
            }
        address out = c + batch * stride_c * sizeof(float);
        ok = ok && !cuMemcpyHtoDAsync_v2(out, product, (size_t)m * n * sizeof(float), handle->stream) &&
             !cuStreamSynchronize(handle->stream);
        free(product), free(left.values), free(right.values);
        if (!ok) return 14;
    }
    return 0;
}
