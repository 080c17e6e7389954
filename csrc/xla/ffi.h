/* What a handler has to know of XLA's foreign function interface, version 0.x: the structs that XLA fills in.  Written from
 * the interface's layout; fields that are not used here are only kept in place.  A struct says how many bytes of it the
 * caller knows, and fields are only ever added at its end. */
#pragma once
#include <stddef.h>
#include <stdint.h>

enum { FFI_MAJOR = 0, FFI_MINOR = 1 }; /* a handler of minor version m runs in every XLA of a minor version from m on */

enum { FFI_EXTENSION_METADATA = 1 };
enum { FFI_STAGE_EXECUTE = 3 };
enum { FFI_ATTR_SCALAR = 3 };
enum { FFI_S64 = 5 };
enum { FFI_INVALID_ARGUMENT = 3, FFI_OUT_OF_RANGE = 11, FFI_INTERNAL = 13 };

typedef struct ffi_extension {
    size_t struct_size;
    int32_t type;
    struct ffi_extension *next;
} ffi_extension;

typedef struct ffi_version {
    size_t struct_size;
    ffi_extension *extensions;
    int major, minor;
} ffi_version;

typedef struct ffi_metadata {
    size_t struct_size;
    ffi_version version;
    uint32_t traits;
} ffi_metadata;

/* Comes instead of a call when the handler is registered: it says for which version it was written. */
typedef struct ffi_metadata_extension {
    ffi_extension base;
    ffi_metadata *metadata;
} ffi_metadata_extension;

typedef struct ffi_buffer {
    size_t struct_size;
    ffi_extension *extensions;
    int32_t dtype;
    void *data;
    int64_t rank;
    int64_t *dims;
} ffi_buffer;

/* Arguments, or results. */
typedef struct ffi_values {
    size_t struct_size;
    ffi_extension *extensions;
    int64_t size;
    int32_t *types;
    void **values; /* of buffers: ffi_buffer * */
} ffi_values;

typedef struct ffi_span {
    const char *ptr;
    size_t len;
} ffi_span;

typedef struct ffi_scalar {
    int32_t dtype;
    void *value;
} ffi_scalar;

typedef struct ffi_attrs {
    size_t struct_size;
    ffi_extension *extensions;
    int64_t size;
    int32_t *types;
    ffi_span **names;
    void **values;
} ffi_attrs;

typedef struct ffi_error_args {
    size_t struct_size;
    ffi_extension *extensions;
    const char *message;
    int32_t code;
} ffi_error_args;

typedef struct ffi_api {
    size_t struct_size;
    ffi_extension *extensions;
    ffi_version version;
    const void *internal;
    void *(*error_create)(ffi_error_args *args);
} ffi_api;

typedef struct ffi_call_frame {
    size_t struct_size;
    ffi_extension *extensions;
    const ffi_api *api;
    void *context;
    int32_t stage;
    ffi_values args;
    ffi_values rets;
    ffi_attrs attrs;
} ffi_call_frame;
