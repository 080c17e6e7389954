/* The handler by which XLA calls bound graphs, from threads of its own and without Python.
 *
 * A call names its function by the attribute "id".  Its buffers hold one or more batches, each of so many bytes as the
 * function's arguments and results have: the graph runs once for each. */
#include "xla/ffi.h"
#include "abi/bound.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

static _Atomic(gg_xla_function *) functions;

void gg_xla_register(gg_xla_function *function) {
    function->next = atomic_load(&functions);
    while (!atomic_compare_exchange_weak(&functions, &function->next, function)) {}
}

int gg_xla_api_major(void) { return FFI_MAJOR; }
int gg_xla_api_minor(void) { return FFI_MINOR; }

static gg_xla_function *find(int64_t id) {
    gg_xla_function *f = atomic_load(&functions);
    while (f != NULL && f->id != id) f = f->next;
    return f;
}

static void *failed(const ffi_call_frame *frame, int code, const char *message) {
    return frame->api->error_create(
        &(ffi_error_args){ .struct_size = sizeof(ffi_error_args), .message = message, .code = code });
}

/* The attribute "id"; -1 if there is none. */
static int64_t id_of(const ffi_attrs *attrs) {
    for (int64_t i = 0; i < attrs->size; i++) {
        const ffi_span *name = attrs->names[i];
        if (name->len != 2 || memcmp(name->ptr, "id", 2) != 0 || attrs->types[i] != FFI_ATTR_SCALAR) continue;
        const ffi_scalar *scalar = attrs->values[i];
        if (scalar->dtype == FFI_S64) return *(const int64_t *)scalar->value;
    }
    return -1;
}

/* Bytes of an element, by the number of XLA's dtype: of those that ggrad has. */
static int64_t width(int32_t dtype) {
    enum { S32 = 4, F16 = 10, F32 = 11, BF16 = 16 };
    return dtype == S32 || dtype == F32 ? 4 : dtype == F16 || dtype == BF16 ? 2 : 0;
}

static int64_t bytes_of(const ffi_buffer *b) {
    int64_t n = width(b->dtype);
    for (int64_t i = 0; i < b->rank; i++) n *= b->dims[i];
    return n;
}

/* Calls of one function come one after another; those of others run beside them. */
static pthread_mutex_t changes = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

static void take(gg_xla_function *f) {
    pthread_mutex_lock(&changes);
    while (f->busy) pthread_cond_wait(&changed, &changes);
    f->busy = 1;
    pthread_mutex_unlock(&changes);
}

static void give_back(gg_xla_function *f) {
    pthread_mutex_lock(&changes);
    f->busy = 0;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&changes);
}

static void *describe_fault(const ffi_call_frame *frame, const gg_xla_function *f, const gg_fault *fault) {
    char message[256];
    if (fault->code == GG_INDEX || fault->code == GG_SHARED)
        snprintf(message, sizeof message, "ggrad.jax: %s: an index is %lld, and must be from %lld to %lld", f->name,
                 (long long)fault->value, (long long)fault->least, (long long)fault->limit - 1);
    else snprintf(message, sizeof message, "ggrad.jax: %s: the run ended with fault %d", f->name, (int)fault->code);
    return failed(frame, FFI_OUT_OF_RANGE, message);
}

/* How many batches the buffers hold, all of them as many; -1 if they are not the function's. */
static int64_t batches(const gg_xla_function *f, const ffi_call_frame *frame) {
    if (frame->args.size != f->n_args || frame->rets.size != f->n_rets) return -1;
    int64_t n = 1;
    bool known = false;
    for (int i = 0; i < f->n_args + f->n_rets; i++) {
        const ffi_buffer *b = i < f->n_args ? frame->args.values[i] : frame->rets.values[i - f->n_args];
        const int64_t bytes = bytes_of(b), one = f->nbytes[i];
        if (one == 0) {
            if (bytes != 0) return -1;
            continue;
        }
        if (bytes % one != 0 || (known && bytes / one != n)) return -1;
        n = bytes / one;
        known = true;
    }
    return n;
}

static void *run(const ffi_call_frame *frame) {
    gg_xla_function *f = find(id_of(&frame->attrs));
    if (f == NULL)
        return failed(frame, FFI_INVALID_ARGUMENT, "ggrad.jax: the call is of a function of another process");
    const int64_t n = batches(f, frame);
    if (n < 0) return failed(frame, FFI_INVALID_ARGUMENT, "ggrad.jax: the buffers are not those of the function");
    const int slots = f->n_args + f->n_rets;
    take(f);
    uintptr_t at[GG_MOST_SLOTS];
    int code = GG_OK;
    for (int64_t k = 0; k < n && code == GG_OK; k++) {
        for (int i = 0; i < slots; i++) {
            const ffi_buffer *b = i < f->n_args ? frame->args.values[i] : frame->rets.values[i - f->n_args];
            at[i] = f->nbytes[i] == 0 ? 1 : (uintptr_t)b->data + (uintptr_t)(k * f->nbytes[i]);
        }
        code = gg_run_bound(f->bound, at, f->threads, NULL);
    }
    const gg_fault fault = *f->bound->fault;
    give_back(f);
    return code == GG_OK ? NULL : describe_fault(frame, f, &fault);
}

void *gg_xla_call(void *call_frame) {
    const ffi_call_frame *frame = call_frame;
    for (const ffi_extension *e = frame->extensions; e != NULL; e = e->next) {
        if (e->type != FFI_EXTENSION_METADATA) continue;
        ffi_metadata *metadata = ((const ffi_metadata_extension *)e)->metadata;
        metadata->version.major = FFI_MAJOR;
        metadata->version.minor = FFI_MINOR;
        metadata->traits = 0;
        return NULL;
    }
    if (frame->api->version.major != FFI_MAJOR)
        return failed(frame, FFI_INTERNAL, "ggrad.jax: this XLA has another foreign function interface");
    return frame->stage == FFI_STAGE_EXECUTE ? run(frame) : NULL;
}
