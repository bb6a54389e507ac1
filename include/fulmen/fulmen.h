/* SPDX-FileCopyrightText: fulmen contributors
 * SPDX-License-Identifier: Apache-2.0
 *
 * fulmen: exact attention, forward and backward. This header is the whole public surface of the
 * library and its manual; everything else (C++, Python, the command line) stands on it.
 *
 *   1  Introduction            a call in six lines, what is computed, who owns what, errors
 *   2  Status and types        fulmen_status, fulmen_last_error, fulmen_dtype, fulmen_tensor
 *   3  The problem             fulmen_problem (options), fulmen_tensors (arrays)
 *   4  Simple call             fulmen_attention, fulmen_attention_backward
 *   5  Plan once, run often    fulmen_plan_create, fulmen_forward, fulmen_backward
 *   6  Beside attention        fulmen_merge, fulmen_append_kv, fulmen_rotary, fulmen_quantise,
 *                              fulmen_mla_indexer, fulmen_dense_mask, fulmen_expression_create
 *   7  Explanations            fulmen_explain, fulmen_build_info, fulmen_gpu_info, fulmen_schema
 *   8  GPUs                    fulmen_device_faults, fulmen_bundle_write, fulmen_cache_clear
 *   9  Everything owned        fulmen_set_log, fulmen_set_num_threads, fulmen_set_parallel_for
 *
 * One call needs sections 1 and 4, and of section 3 the options that it uses. What only experiments
 * need is in fulmen_experimental.h.
 */
#ifndef FULMEN_FULMEN_H_
#define FULMEN_FULMEN_H_

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define FULMEN_API __declspec(dllexport)
#else
#define FULMEN_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------------------------------------
 * 1  Introduction
 *
 * A call:
 *
 *   const int64_t shape[4] = {batch, heads, rows, dim};
 *   fulmen_tensors t;  fulmen_tensors_init(&t);                     all arrays absent
 *   fulmen_tensor_init(&t.q, q, FULMEN_FLOAT32, 4, shape);          and k, v, o alike
 *   fulmen_problem p;  fulmen_problem_init(&p);                     all options off
 *   p.causal = 1;
 *   if (fulmen_attention(&p, &t, NULL) != FULMEN_OK) puts(fulmen_last_error());
 *
 * computes for one batch entry, query head h, its key/value head g = h / (heads_q / heads_kv) and
 * query row i:
 *
 *   s[i,j] = softcap(scale * dot(q[i], k[j])) + bias[i,j] - slope[h] * |i + shift - j|
 *   e[i,j] = exp(s[i,j]) where key j is visible to row i, else 0
 *   o[i]   = sum over j of e[i,j] * v[j] / (sum over j of e[i,j] + exp(sink[h]))
 *   lse[i] = log(sum over j of e[i,j])
 *
 * softcap(x) = cap * tanh(x / cap), off when cap = 0; bias, slopes (ALiBi) and sinks only where
 * given; shift = kv_len - q_len (alignment bottom-right, the default) or 0 (top-left). A row that
 * sees no key gives o = 0 and lse = -inf, and zero gradients. Hidden keys and values never
 * influence anything, whatever they hold. Source: Dao et al., FlashAttention (2022) and
 * FlashAttention-2 (2023); sums are exact, in float32 at least, in float64 for float64 input.
 *
 * Ownership. All arrays belong to the caller. The simple calls (4) allocate and free what they need
 * beside them; the planned calls (5) allocate nothing.
 * Where a call runs. Where q is: host memory means the CPU, memory of an NVIDIA GPU means that GPU;
 * all arrays of a call are in one place. Section 8 says the rest.
 * Threads. Every function may be called from any thread at any time; one plan may be run by several
 * threads at once when each brings its own workspace. Exceptions: section 9.
 * Errors. Every function that can fail returns a fulmen_status. On failure fulmen_last_error()
 * gives one sentence: what was wrong, what was given, what is allowed. Every precondition that the
 * host can see is checked before anything is written. The library never prints and never exits.
 * Bits. Equal calls give o and lse (and stats) the same bits in every run. Gradients have the same
 * bits in every run where deterministic is set, and on the CPU always: each of them, whatever other
 * gradients are asked for, as long as the same implementation makes it. Without it a GPU adds up
 * dq, and sums of dbias, in the order in which blocks finish: last bits may differ from run to run.
 * Calls are equal when options, shapes, strides, contents and, on a GPU, the alignment of pointers,
 * the card and the version of fulmen are.
 * Struct versions. Every struct begins with struct_size, is filled by its _init function and grows
 * only at its end, so that a compiled program keeps working with a later library: _init tells the
 * library the size that the program was compiled with, no more is ever read or written, and fields
 * that the program does not know are at their default, whose bytes are all zero. A program of a
 * later header works with this library too, unless it sets a field that this library does not know:
 * that is refused. fulmen_tensor never grows.
 * ---------------------------------------------------------------------------------------------- */

/* ------------------------------------------------------------------------------------------------
 * 2  Status and types
 * ---------------------------------------------------------------------------------------------- */

typedef enum fulmen_status {
  FULMEN_OK = 0,
  FULMEN_ERROR_ARGUMENT = 1,    /* a value outside what is allowed, a null pointer, an overlap */
  FULMEN_ERROR_SHAPE = 2,       /* ranks or extents that do not fit together */
  FULMEN_ERROR_DTYPE = 3,       /* a dtype, or a mixture of dtypes, that is not allowed */
  FULMEN_ERROR_UNSUPPORTED = 4, /* legal, but not what the chosen backend or this version can do */
  FULMEN_ERROR_DEVICE = 5,      /* the device or its driver failed */
  FULMEN_ERROR_COMPILE = 6,     /* a kernel did not compile; the sentence ends with the log */
  FULMEN_ERROR_NOT_FOUND = 7,   /* a library that the call needs is not on this machine */
  FULMEN_ERROR_OUT_OF_MEMORY = 8,
  FULMEN_ERROR_INTERNAL = 9 /* a bug in fulmen: please report it with the sentence */
} fulmen_status;

/* "FULMEN_ERROR_SHAPE" and so on; "unknown status" for other numbers. Static storage. */
FULMEN_API const char* fulmen_status_name(fulmen_status status);

/* The sentence of the last failed call of this thread; "" if none failed yet. Valid until the next
 * failing call of the same thread. */
FULMEN_API const char* fulmen_last_error(void);

typedef enum fulmen_dtype {
  FULMEN_FLOAT64 = 1,
  FULMEN_FLOAT32 = 2,
  FULMEN_FLOAT16 = 3,
  FULMEN_BFLOAT16 = 4,
  FULMEN_BOOL = 5, /* one byte, 0 is false, all else true */
  FULMEN_INT32 = 6,
  FULMEN_INT64 = 7,
  FULMEN_FLOAT8_E4M3 = 8, /* OCP's e4m3: up to 448, NaN, no infinity. Of q, k and v alone, */
  FULMEN_FLOAT8_E5M2 = 9, /* as the next two: up to 57344, infinities, NaN */
  FULMEN_INT8 = 10,
  FULMEN_UINT8 = 11 /* bytes: of caches of records alone */
} fulmen_dtype;

/* Records of latent attention: the bytes of a row of such a cache. fulmen_tensors says the rest. */
enum { FULMEN_MLA_656 = 656, FULMEN_MLA_584 = 584 };

#define FULMEN_MAX_RANK 4

/* An array: where it starts, what it holds, its extents and its strides in elements. A tensor with
 * data == NULL and rank == 0 is absent. Strides may be 0 (a broadcast input), may not be negative,
 * and need no particular order; any alignment of data is accepted. A null pointer is legal
 * where some extent is 0. */
typedef struct fulmen_tensor {
  size_t struct_size;
  void* data;
  fulmen_dtype dtype;
  int32_t rank;
  int64_t shape[FULMEN_MAX_RANK];
  int64_t strides[FULMEN_MAX_RANK]; /* in elements */
} fulmen_tensor;

/* A contiguous tensor (last axis fastest). rank 0..4; shape may be NULL for rank 0. */
FULMEN_API fulmen_status fulmen_tensor_init(fulmen_tensor* tensor, void* data, fulmen_dtype dtype,
                                            int32_t rank, const int64_t* shape);

/* ------------------------------------------------------------------------------------------------
 * 3  The problem
 * ---------------------------------------------------------------------------------------------- */

typedef enum fulmen_alignment {
  FULMEN_BOTTOM_RIGHT = 0, /* the last row is level with the last key: shift = kv_len - q_len */
  FULMEN_TOP_LEFT = 1      /* the first row is level with the first key: shift = 0 */
} fulmen_alignment;

typedef enum fulmen_backend {
  FULMEN_BACKEND_AUTO = 0, /* where q is: its pointer is looked at, and NULL means the CPU */
  FULMEN_BACKEND_CPU = 1,
  FULMEN_BACKEND_CUDA = 2 /* an NVIDIA GPU; all arrays are in its memory */
} fulmen_backend;

typedef enum fulmen_implementation {
  FULMEN_IMPLEMENTATION_AUTO = 0,
  FULMEN_SCALAR = 1, /* CPU: the oracle, float64, in the order of the equations */
  FULMEN_TILED = 2,  /* CPU: tiles, SIMD, threads; memory linear in the sequence */
  FULMEN_NAIVE = 3,  /* GPU: one thread a row, every option: the oracle there */
  FULMEN_SIMT = 4,   /* GPU: tiles on the ordinary arithmetic units, every option, true float32 */
  FULMEN_SM80 = 5,   /* GPU: tensor cores of Ampere and later */
  FULMEN_SM90 = 6    /* GPU: tensor cores and copy engine of Hopper */
} fulmen_implementation;

/* How the products of float32 inputs may be computed, and what one is off by relative to |x y|;
 * sums, exponentials and divisions are float32 in all three. And whether those of 16-bit inputs may
 * be of 8 bits. fulmen_problem.precision. */
typedef enum fulmen_precision {
  FULMEN_PRECISION_FLOAT32 = 0, /* up to 2^-24: true float32 */
  FULMEN_PRECISION_TF32 = 1,    /* inputs rounded to 11 significant bits: up to 2^-10 */
  FULMEN_PRECISION_3XTF32 = 2,  /* inputs as sums of two such numbers: up to 2^-21, float32-like */
  FULMEN_PRECISION_FP8 = 3      /* of float16 and bfloat16: forward, q, k, v rounded to e4m3 */
} fulmen_precision;

#define FULMEN_NO_LIMIT (-1)

/* The options of a call: plain values. Arrays are in fulmen_tensors. fulmen_problem_init sets the
 * defaults named below. */
typedef struct fulmen_problem {
  size_t struct_size;

  /* scores */
  double scale;   /* NaN (default): 1 / sqrt(max(head_dim_qk, 1)). 0, negative: legal */
  double softcap; /* 0 (default): off; else > 0. It, scale and scale / softcap are refused where
                     sums have no such number: beyond 2^126 and, but for 0, below 2^-126 in
                     magnitude; with float64 q beyond 2^1022 and below 2^-1022 */

  /* masks; others are arrays: mask, bias, ids, lengths */
  int32_t causal;             /* 0 (default) or 1: row i sees j <= i + shift */
  fulmen_alignment alignment; /* for causal, window, chunks and ALiBi; default bottom-right */
  int64_t window_left;        /* j >= i + shift - window_left; FULMEN_NO_LIMIT (default) or >= 0 */
  int64_t window_right; /* j <= i + shift + window_right; likewise; with causal: 0 or no limit */
  int64_t prefix;       /* keys below it are visible to all rows; 0 (default): none; needs causal */
  int64_t chunk;        /* (i + shift) / chunk == j / chunk, rounded down; 0 (default): none */

  /* dropout */
  double dropout_p;    /* probability of dropping, [0, 1]; 0 (default): exactly no dropout */
  uint64_t rng_seed;   /* dropout's Philox key ... */
  uint64_t rng_offset; /* ... and the last word of its counter, below 2^32 */

  /* hints and promises */
  int64_t max_q;  /* packed q only: no sequence has more query rows; 0 (default): not said */
  int64_t max_kv; /* packed k or page_table only: no sequence has more keys, what it has beyond them
                     is out of range; 0 (default): not said. With page_indptr it must be said */
  int32_t deterministic;   /* 1: gradients have the same bits in every run: section 1, Bits */
  int32_t batch_invariant; /* 1: bits do not depend on other batch entries. The CPU always is */

  /* where and how */
  fulmen_backend backend;
  fulmen_implementation implementation; /* its backend is chosen with it */
  int32_t device; /* CUDA's number of the GPU; -1 (default): where q is, else 0. >= 0 means CUDA */
  fulmen_precision precision; /* a permission that tensor cores use, of float32 q, k, v; FP8: of
                                 float16 and bfloat16, where no stats are asked for. Where no kernel
                                 does, products are as without. Refused for other dtypes */
  const char* device_name;    /* NULL (default), or a GPU that need not be here: "h100", "sm_90a": a
                                 plan for it compiles and explains, and does not run */

  /* a score and a mask of the caller's: section 6 */
  uint64_t expression; /* 0 (default): none; else of fulmen_expression_create */
  double scalar0;      /* the values of its scalars, in the order of their names; 0 (default) where
                          it has fewer. Runs of a plan take those of the plan */
  double scalar1;
  double scalar2;
  double scalar3;
  double scalar4;
  double scalar5;
  double scalar6;
  double scalar7;

  /* lists of blocks: the array blocks */
  int64_t block_q;  /* query rows of a block: a multiple of 64; 0 (default) without the array */
  int64_t block_kv; /* keys of a block, likewise */

  /* sparse attention */
  int32_t slots; /* 1: page_table holds the slot of each key; 0 (default): pages */

  /* parts of a sequence */
  int32_t accumulate; /* 1: o, stats and lse, or dq, dk and dv, hold a part, which the result joins;
                         0 (default) */
} fulmen_problem;

/* All options at their defaults. _sized: for other languages, which say how large a struct they
 * know; NULL: nothing happens. */
FULMEN_API void fulmen_problem_init_sized(fulmen_problem* problem, size_t struct_size);
static inline void fulmen_problem_init(fulmen_problem* problem) {
  fulmen_problem_init_sized(problem, sizeof(fulmen_problem));
}

/* The arrays of a call. Axes are named in order; leading axes of extent 1 may be left out, so that
 * q may be (batch, head, q_row, dim), (head, q_row, dim) or (q_row, dim). Memory order is free: it
 * is what the strides say.
 *
 * Packed sequences: with cu_q and cu_kv, q is (head, total_q, dim), k and v (kv_head, total_kv,
 * dim), lse (head, total_q); sequence b owns rows cu_q[b] .. cu_q[b + 1] - 1 and its own keys
 * likewise.
 *
 * Caches: with page_table, k and v are pools of pages, (page, kv_head, row of the page, dim), each
 * with strides of its own: any page size from 1 row, both orders of heads and rows, k and v in one
 * allocation or two. kv_lengths, now required, counts the keys of request b (the rows of the
 * present call among them: they were appended before). Key j is row j % page_size of pool page
 * page_table[b, j / page_size], page_size being the extent of k's row axis. Entries at or past
 * ceil(kv_lengths[b] / page_size), and rows past the length, are never read, whatever they hold.
 * Pages may stand in any order and be shared between requests. With page_indptr, (batch + 1),
 * page_table has one axis and request b owns its entries page_indptr[b] .. page_indptr[b + 1] - 1;
 * max_kv is required then, since only the caller knows what those are. A contiguous cache with an
 * index of the batch is the same: one page for each entry of the cache, and page_table (batch, 1)
 * holds the index. q is (batch, head, q_row, dim), padded where q_lengths is given, or packed by
 * cu_q (cu_kv is left out): chunks of prompts and single new tokens in one call. bias, mask and
 * kv_ids have a column for each key, at least as many as a request may have: max_kv, or what the
 * table holds.
 *
 * Sparse attention: with the option slots, page_table holds rows of the pools instead of pages, one
 * for each key: key j of request b is slot page_table[b, j] = page * page_size + row, in any order,
 * and where that is -1 the key is hidden. A request is then one query row with the keys that were
 * chosen for it: rows of the same request are batch entries of q_row 1 beside the same pools.
 *
 * kv_start, with and without pages: left padding. Keys below it are hidden, and a request is its
 * keys from there on: key kv_start[b] stands at position 0, shift = kv_len - kv_start - q_len, and
 * prefix, chunk and dropout count from it too. Columns of bias, mask and kv_ids count all keys.
 * positions: row i stands there instead of at i + shift, for causal, window, chunk and ALiBi alike.
 * tree: draft tokens. Bit t of row i says whether it sees key kv_len - q_len + t of its request;
 * earlier keys are visible. It hides beside every other mask. A request has at most 64 query rows
 * then. With positions, those last q_len keys stand at the positions of their rows too, not at
 * their own number.
 *
 * kv_shared, with page_table: a prompt that all requests have. The caller says that the first
 * kv_shared[b] keys of request b lie in the pages of the first request that has any keys; what is
 * computed is the same without it. A GPU then reads these keys once for the rows of all requests
 * instead of once a request, as far as the fewest that a request names, and as all query rows stand
 * behind them; fulmen_explain tells whether. On the CPU the tables are compared.
 *
 * Segments: rows and keys that are parts of a longer sequence, as on one of several devices that
 * share it, or a chunk of a prompt. A segment says that rows (keys) first .. first + count - 1 of
 * the call stand at the positions from its third number on. The positions take the place of i +
 * shift, i and j in all that options say: causal, window, prefix, chunk, ALiBi, dropout, and i, j
 * and p of expressions. Arrays with an element for each row or key (q_ids, kv_ids, bias, mask) have
 * those of the call. A row or key of no segment takes no part; one without rows says nothing.
 * Without kv_segments key j stands at position j. Results of calls on disjoint keys merge to that
 * of the whole sequence, dropout included, and their gradients add up to its gradients. Segments
 * may be in any order, lie within the rows of their sequence, share none, and their positions are 0
 * to 2147483647; what a device finds otherwise (section 8) is recorded: a row is of the first
 * segment that has it, and a position counts as the nearest there is. Caches, kv_start, positions,
 * tree and blocks are refused beside them.
 *
 * Parts in place: with the option accumulate, o, stats and lse hold the result of the same rows on
 * other keys, and become that on those and the keys of this call, as by fulmen_merge, but without
 * another pass over them. o is of C; stats carry the part and are needed; lse is written, not read.
 * A row that has seen no key has row max -inf and row sum 0, and its o may hold anything; what a
 * row holds that sees none in this call stays. Sinks are of the last call alone. Caches are refused
 * beside it; so are, forward, implementation sm80, and sm90 in head dimensions above 320. Backward,
 * dq, dk and dv are of C, one of them at least, and the gradients of the call are added to them; on
 * GPUs those are rounded to T first, and need room in the workspace. o and stats are those on all
 * keys, and dbias, dsinks and the gradients of captures are written as ever.
 *
 * page_table, page_indptr, kv_start, kv_shared, positions and tree are of forward calls; backward
 * refuses them. What a device finds out of range (section 8) makes a request empty: o = 0, lse =
 * -inf; a page that k and v do not have, those of its query rows that see one of its keys.
 *
 * Quantised arrays, of forward calls: k and v of one of the three 8-bit types, with q of float32,
 * float16 or bfloat16, or of the same 8-bit type. Their values are q_scale * q, k_scale * k and
 * v_scale * v, where a scale that is absent is 1: numbers per tensor, batch entry or page, head,
 * row, by the extents that are not 1; of v also per dim, then for all rows. Scales of hidden keys,
 * and of rows that are never read, may be anything; one that is seen and not finite makes its
 * values NaN. All that this header says of q, k and v, it says of these values.
 *
 * Records, of forward calls too: k of FULMEN_UINT8 whose last axis has 656 or 584 bytes is a cache
 * of latent attention as DeepSeek's models keep it, beside q of float32, float16 or bfloat16 with
 * 576 or 512 numbers, and v the first dim_v bytes of the same rows, a view of k. Little-endian: 656
 * (576 numbers): 512 e4m3; 4 float32, the scales of each 128 of them; 64 bfloat16 584 (512
 * numbers): 448 e4m3, 64 bfloat16; and behind all rows of a page, for each 8 bytes, the scales of
 * each 64, 2^(byte - 127), and one unused. Rows of a page are 584 bytes apart by the strides: the
 * page is rows * 576, then rows * 8 bytes. Without a page_table a batch entry is one. k_scale and
 * v_scale are absent. The scale of a record is multiplied as it is, whatever it is.
 *
 * dtypes: q, k, v alike, one of the four floating-point types, but for quantised ones; T below is
 * the type of q, or where q is quantised that of o: float32, float16 or bfloat16. C is float64 for
 * float64, else float32. Broadcast means an extent of 1 or the full extent. */
typedef struct fulmen_tensors {
  size_t struct_size;

  /* inputs */
  fulmen_tensor q;            /* (batch, head, q_row, dim_qk)    dim_qk 0 .. 576 */
  fulmen_tensor k;            /* (batch, kv_head, kv_row, dim_qk)    heads a multiple of kv_heads */
  fulmen_tensor v;            /* (batch, kv_head, kv_row, dim_v)    dim_v 1 .. 512 */
  fulmen_tensor bias;         /* broadcast to (batch, head, q_row, kv_row); T or float32 or C */
  fulmen_tensor mask;         /* bool, broadcast likewise; true: visible */
  fulmen_tensor alibi_slopes; /* (head) or (batch, head); float32 or C */
  fulmen_tensor sinks;        /* (head); T, float32 or C */
  fulmen_tensor q_lengths;  /* (batch) int32 or int64: rows from there on are not computed: o = 0 */
  fulmen_tensor kv_lengths; /* (batch) likewise: keys from there on are hidden */
  fulmen_tensor cu_q;       /* (batch + 1) int32 or int64, not decreasing, first 0 */
  fulmen_tensor cu_kv;      /* (batch + 1) likewise */
  fulmen_tensor q_ids;      /* (q_row) or (batch, q_row); packed (total_q). int32 or int64; */
  fulmen_tensor kv_ids;     /* likewise of keys: visible only where both ids are equal */
  fulmen_tensor rng;        /* (2) int64: seed, offset, read when the call runs instead of rng_seed
                               and rng_offset: fresh dropout in every replay of a CUDA graph */

  /* results of the forward pass, inputs of the backward pass */
  fulmen_tensor o;     /* (batch, head, q_row, dim_v); T, or float32 */
  fulmen_tensor lse;   /* (batch, head, q_row) C; natural logarithm; optional */
  fulmen_tensor stats; /* (batch, head, q_row, 2) C, optional: row max and row sum apart. Backward
                          takes these, or else lse, which is accurate for |lse| < 1000 */

  /* inputs of the backward pass */
  fulmen_tensor dout; /* as o; T or float32 */
  fulmen_tensor dlse; /* as lse; optional: the gradient that arrives through lse */

  /* results of the backward pass: those that are present are computed, each alone if need be */
  fulmen_tensor dq;     /* as q, same dtype */
  fulmen_tensor dk;     /* as k, same dtype */
  fulmen_tensor dv;     /* as v, same dtype */
  fulmen_tensor dbias;  /* as bias, same extents and dtype: summed over the broadcast axes */
  fulmen_tensor dsinks; /* as sinks, same dtype */

  /* inputs of calls over caches: forward only */
  fulmen_tensor page_table;  /* (batch, page) int32 or int64; with page_indptr (page) */
  fulmen_tensor page_indptr; /* (batch + 1) int32 or int64, not decreasing */
  fulmen_tensor kv_start;    /* (batch) int32 or int64: 0 .. the number of keys */
  fulmen_tensor positions;   /* (q_row) or (batch, q_row); packed (total_q). int32 or int64, of 32
                                bits */
  fulmen_tensor tree;        /* likewise; int64 */

  /* of quantised k and v: forward only */
  fulmen_tensor k_scale; /* float32, broadcast to (batch, kv_head, kv_row, 1), or where there is a
                            page_table to (page, kv_head, row of the page, 1) */
  fulmen_tensor v_scale; /* likewise; or one for each dim: to (batch, kv_head, 1, dim_v) */

  /* what the expression of the problem reads, in the order of its names: floating-point, int32,
     int64 or bool, an axis for each index, of any extent from 1 */
  fulmen_tensor capture0;
  fulmen_tensor capture1;
  fulmen_tensor capture2;
  fulmen_tensor capture3;
  fulmen_tensor capture4;
  fulmen_tensor capture5;
  fulmen_tensor capture6;
  fulmen_tensor capture7;

  /* results of the backward pass: as capture0 .. capture7, of floating-point ones, same dtype */
  fulmen_tensor dcapture0;
  fulmen_tensor dcapture1;
  fulmen_tensor dcapture2;
  fulmen_tensor dcapture3;
  fulmen_tensor dcapture4;
  fulmen_tensor dcapture5;
  fulmen_tensor dcapture6;
  fulmen_tensor dcapture7;

  /* input of calls over pages: forward only */
  fulmen_tensor kv_shared; /* (batch) or (1), int32 or int64: 0 or more */

  /* block-sparse attention, of forward and backward calls: rows of a sequence in blocks of block_q,
     its keys in blocks of block_kv. A row sees the keys of the blocks that the list of its own
     block names, as far as every other mask shows them. Entries may be in any order and stand
     twice; -1 names none, so that lists may be of any length up to that of the longest. */
  fulmen_tensor blocks; /* (batch or 1, head or kv_head or 1, ceil(q_row / block_q), entry); packed
                           (sequence or 1, .., ceil(max_q / block_q), entry). int32 or int64 */

  /* input of quantised calls: forward only */
  fulmen_tensor q_scale; /* of quantised q: float32, broadcast to (batch, head, q_row, 1) */

  /* parts of a longer sequence, of forward and backward calls */
  fulmen_tensor q_segments;  /* (batch, segment, 3), batch broadcast, 1 to 64 segments; int32 or
                                int64: first row, rows, position of the first */
  fulmen_tensor kv_segments; /* likewise of keys; with q_segments */
} fulmen_tensors;

FULMEN_API void fulmen_tensors_init_sized(fulmen_tensors* tensors, size_t struct_size);
static inline void fulmen_tensors_init(fulmen_tensors* tensors) { /* all absent */
  fulmen_tensors_init_sized(tensors, sizeof(fulmen_tensors));
}

/* ------------------------------------------------------------------------------------------------
 * 4  Simple call
 * ---------------------------------------------------------------------------------------------- */

/* Forward: reads q, k, v and the inputs that are present, writes o, and lse and stats where
 * present. Outputs may not overlap any other array. stream: NULL on the CPU; on a GPU a CUstream of
 * its device, NULL being the default stream. On a GPU the call returns when its work is enqueued,
 * workspace comes from the stream's memory pool, and the first call of a kind compiles its
 * kernels. */
FULMEN_API fulmen_status fulmen_attention(const fulmen_problem* problem,
                                          const fulmen_tensors* tensors, void* stream);

/* Backward: reads the inputs of the forward call, its o, stats (or lse), dout and dlse; writes the
 * gradients that are present, at least one. */
FULMEN_API fulmen_status fulmen_attention_backward(const fulmen_problem* problem,
                                                   const fulmen_tensors* tensors, void* stream);

/* ------------------------------------------------------------------------------------------------
 * 5  Plan once, run often
 *
 * A plan fixes options, shapes, strides and dtypes. Pointers and the contents of arrays may change
 * between runs, lengths, offsets and rng included. A run allocates nothing (the scalar oracle,
 * asked for by name, copies the rows of a head to float64 on the heap). On a GPU the plan is where
 * kernels are compiled and loaded; a run compiles nothing, waits for nothing and reads no device
 * memory, so that CUDA graphs capture it. The alignment that the chosen kernels need of pointers is
 * part of the plan: a pointer that breaks it is an error.
 * ---------------------------------------------------------------------------------------------- */

typedef enum fulmen_operation {
  FULMEN_OPERATION_FORWARD = 0,
  FULMEN_OPERATION_BACKWARD = 1
} fulmen_operation;

typedef struct fulmen_plan fulmen_plan;

/* Makes a plan, or fails with the sentence and *plan = NULL. Pointers in tensors are not kept and
 * not read: a present tensor may have data == NULL here (then say backend or device, since NULL is
 * nowhere). */
FULMEN_API fulmen_status fulmen_plan_create(const fulmen_problem* problem,
                                            const fulmen_tensors* tensors,
                                            fulmen_operation operation, fulmen_plan** plan);

FULMEN_API void fulmen_plan_destroy(fulmen_plan* plan); /* NULL: nothing happens */

/* Bytes that a run needs beside the arrays: linear in the number of rows. 0 for NULL. */
FULMEN_API size_t fulmen_plan_workspace_bytes(const fulmen_plan* plan);

/* Runs a plan of that operation. workspace: at least fulmen_plan_workspace_bytes bytes, any
 * alignment, any contents, used by this run alone and shared with no array of it; NULL when that is
 * 0. */
FULMEN_API fulmen_status fulmen_forward(const fulmen_plan* plan, const fulmen_tensors* tensors,
                                        void* workspace, size_t workspace_bytes, void* stream);
FULMEN_API fulmen_status fulmen_backward(const fulmen_plan* plan, const fulmen_tensors* tensors,
                                         void* workspace, size_t workspace_bytes, void* stream);

/* ------------------------------------------------------------------------------------------------
 * 6  Beside attention
 * ---------------------------------------------------------------------------------------------- */

typedef struct fulmen_merge_part {
  size_t struct_size;
  fulmen_tensor o;   /* (batch, head, row, dim), float; missing leading axes count as 1 */
  fulmen_tensor lse; /* (batch, head, row), float32 or float64 */
} fulmen_merge_part;

FULMEN_API void fulmen_merge_part_init_sized(fulmen_merge_part* part, size_t struct_size);
static inline void fulmen_merge_part_init(fulmen_merge_part* part) { /* both absent */
  fulmen_merge_part_init_sized(part, sizeof(fulmen_merge_part));
}

/* The attention over the union of the parts' keys, from the attention over each: exact, in any
 * order of parts, a part that saw nothing (lse = -inf) changes nothing. Parts are made without
 * sinks; sinks ((head) or absent) enter here. o and lse (absent: not wanted) are written; o may be
 * the o of a part, lse its lse. num_parts >= 1, on a GPU at most 32. Runs where o is: with all
 * arrays in the memory of one GPU there, on the stream (NULL: its default stream). */
FULMEN_API fulmen_status fulmen_merge(const fulmen_merge_part* parts, size_t num_parts,
                                      const fulmen_tensor* sinks, const fulmen_tensor* o,
                                      const fulmen_tensor* lse, void* stream);

/* New rows for caches of keys and values. fulmen_append_init sets all arrays absent.
 *
 * A cache is a pool of pages: row r of page p, (.., p, kv_head, r, dim), is slot p * page_size + r,
 * page_size being the extent of the row axis (any, from 1). Pools have any strides, those of k and
 * v apart: pages outermost or heads, k and v in one pool or in two. A contiguous cache is a pool
 * with one page an entry.
 *
 * k and v are (batch, kv_head, row, dim), or packed: (kv_head, total rows, dim) with cu_new, by
 * which sequence b owns rows cu_new[b] .. cu_new[b + 1] - 1; rows outside are left alone. `row`
 * below is the row axis of k, also where packed.
 *
 * Where row i of request b goes, one of two:
 *   slots: slots[b, i]; -1: the row is skipped
 *   page_table: to place p = kv_lengths[b] + i of the request, which is row p % page_size of page
 *     page_table[b, p / page_size]. With page_indptr the table is of rank 1, and request b has
 *     entries page_indptr[b] .. page_indptr[b + 1] - 1 of it. kv_lengths count what the cache holds
 *     before the call; who attends afterwards passes the new lengths.
 *
 * Rotary embedding (Su et al., RoFormer, 2021, section 3.4.2), where cos and sin are given: of row
 * i at position t = positions[b, i], by default kv_lengths[b] + i, each pair (x0, x1) of the first
 * rotary_dim = 2 * (columns of cos) elements of a head of k and q becomes
 *
 *   (x0 cos[t, j] - x1 sin[t, j], x1 cos[t, j] + x0 sin[t, j])
 *
 * computed in float32 (float64 for float64) and rounded once. Pair j is elements j and
 * j + rotary_dim / 2, or 2 j and 2 j + 1 where interleaved is 1. Elements from rotary_dim on are
 * copied; v never rotates. Tables hold any rule of frequencies; they are the caller's. q is written
 * to q_out, which may be q itself; its row needs a position only, and is written whatever its slot.
 *
 * Quantised caches: k_cache and v_cache of one of the three 8-bit types, where T is not float64.
 * Then x / scale is stored, the nearest number of the type: ties to even, what is beyond the
 * largest becomes that, NaN stays NaN but 0 in int8. x is in float32, after its rotation; the scale
 * is that of the place, with k_scale and v_scale as attention reads them; absent: 1.
 *
 * Records: k_cache of FULMEN_UINT8 with 656 or 584 bytes, k with 576 or 512 numbers of which the
 * last 64 are those that rotate (cos has 32 columns), v and v_cache absent. What comes before is
 * divided, group by group, by the smallest power of two that makes the largest at most 448, from
 * 2^-13 on, and stored as e4m3.
 *
 * Else what does not rotate has the same bits in the cache. Two rows of a call may not have one
 * slot: of such rows the cache then has elements of either.
 *
 * In host memory contents of slots, positions, lengths, tables and offsets are checked before
 * anything is written. On a GPU the row of an entry that is out of range is not written and a fault
 * is recorded: FULMEN_FAULT_SLOTS (a slot, or a row beyond the pages of its request),
 * FULMEN_FAULT_PAGES (a page), FULMEN_FAULT_POSITIONS, FULMEN_FAULT_KV_LENGTHS, and
 * FULMEN_FAULT_KV_OFFSETS (cu_new, page_indptr: the request counts as empty; where cu_new
 * decreases, rows of other requests may be left out too). */
typedef struct fulmen_append {
  size_t struct_size;

  fulmen_tensor k_cache; /* (page, kv_head, row of the page, dim_qk): written; T, or 8 bits */
  fulmen_tensor
      v_cache; /* (page, kv_head, row of the page, dim_v): written; the dtype of k_cache */

  fulmen_tensor k;      /* (batch, kv_head, row, dim_qk); a floating-point type T */
  fulmen_tensor v;      /* (batch, kv_head, row, dim_v); T */
  fulmen_tensor cu_new; /* (batch + 1) int32 or int64: k, v, q are packed, without a batch axis */
  fulmen_tensor slots;  /* (batch, row), packed (row); int32 or int64 */
  fulmen_tensor page_table;  /* (batch, page of the request), or (entry); int32 or int64 */
  fulmen_tensor page_indptr; /* (batch + 1) int32 or int64 */
  fulmen_tensor kv_lengths;  /* (batch) int32 or int64 */

  fulmen_tensor positions; /* (row) for all requests or (batch, row); int32 or int64 */
  fulmen_tensor cos;       /* (position, rotary_dim / 2); T, float32, or with float64 k float64 */
  fulmen_tensor sin;       /* as cos, of its dtype */
  fulmen_tensor q;         /* (batch, head, row, dim_qk); T; optional, with cos and sin */
  fulmen_tensor q_out;     /* as q: written; may be q */

  int32_t interleaved; /* 0 (default): pairs (j, j + rotary_dim / 2); 1: (2 j, 2 j + 1) */

  fulmen_tensor k_scale; /* float32, broadcast to (page, kv_head, row of the page, 1) */
  fulmen_tensor v_scale; /* likewise */
} fulmen_append;

FULMEN_API void fulmen_append_init_sized(fulmen_append* append, size_t struct_size);
static inline void fulmen_append_init(fulmen_append* append) { /* all absent */
  fulmen_append_init_sized(append, sizeof(fulmen_append));
}

/* Runs where k_cache is: with all arrays in the memory of one GPU there, on the stream (NULL: its
 * default stream), in one kernel that allocates nothing and waits for nothing; NULL on the CPU.
 * Outputs overlap no other array, but q_out may be q, and v_cache may be k_cache counted from
 * another page: no page may then be of K in one slot and of V in another. */
FULMEN_API fulmen_status fulmen_append_kv(const fulmen_append* append, void* stream);

/* The same rotation alone: x (batch, head, row, dim) into out, which may be x. positions: as above,
 * or absent: row i is at position i. Its gradient is the rotation by -sin. Runs where x is. */
FULMEN_API fulmen_status fulmen_rotary(const fulmen_tensor* x, const fulmen_tensor* positions,
                                       const fulmen_tensor* cos, const fulmen_tensor* sin,
                                       int32_t interleaved, const fulmen_tensor* out, void* stream);

/* Numbers of 8 bits for a cache, from rows of more. fulmen_quantisation_init sets all arrays
 * absent.
 *
 *   values = R (x - constant) / scale, rounded to the nearest number of their type
 *
 * constant has a number for each head and dim; R, where rotate is 1, is Hadamard's matrix over the
 * square root of its size, on parts of a row: of the largest power of two that divides dim. What is
 * absent is not there: without scale and with values of the dtype of x it is the rotation alone,
 * which undoes itself. Rounding is to even at ties, what is beyond the largest number of the type
 * becomes that, NaN stays NaN but 0 in int8.
 *
 * Keys less a constant, rotated like their queries, give scores that differ by one number a row
 * (scale * dot(q, constant)) from those of the keys: o is the same, where no softcap and no sink
 * stands beside the scores, and single dims that are large no longer coarsen all others. Sources:
 * Ashkboos et al., QuaRot (2024); Zhang et al., SageAttention (2024).
 *
 * find_constant: constant, (batch, head, 1, dim), is written before it is taken off: the mean of up
 * to 256 of the rows that count, evenly spread, of those that are finite; 0 where that is less than
 * half of their size, when it would gain nothing. find_scale: scale is written: for each of its
 * elements headroom times the largest number that it divides, of those that are finite, over the
 * largest of the type (448, 57344, 127), and 2^-100 at least. Both else are read: rows that are
 * appended later take those of the cache. Rows from lengths[b] on are not read; their values are 0.
 *
 * Values are what append_kv stores of R (x - constant) in float32 by the same scale. */
typedef struct fulmen_quantisation {
  size_t struct_size;

  fulmen_tensor x;        /* (batch, head, row, dim), dim 1 .. 512; T: float32, float16, bfloat16 */
  fulmen_tensor values;   /* as x: written; one of the three 8-bit types, or T without a scale */
  fulmen_tensor constant; /* float32, broadcast to (batch, head, 1, dim) */
  fulmen_tensor scale;    /* float32, broadcast to (batch, head, row, 1) or (batch, head, 1, dim) */
  fulmen_tensor lengths;  /* (batch) int32 or int64: rows that count */

  int32_t rotate; /* each 0 (default) or 1 */
  int32_t find_constant;
  int32_t find_scale;
  double headroom; /* 1 (default) or more: rows to come may be so much larger */
} fulmen_quantisation;

FULMEN_API void fulmen_quantisation_init_sized(fulmen_quantisation* quantisation,
                                               size_t struct_size);
static inline void fulmen_quantisation_init(fulmen_quantisation* quantisation) { /* all absent */
  fulmen_quantisation_init_sized(quantisation, sizeof(fulmen_quantisation));
}

/* Runs where x is: with all arrays in the memory of one GPU there, on the stream (NULL: its default
 * stream), in one to three kernels; allocates nothing and waits for nothing; NULL on the CPU. What
 * is written overlaps no other array. In host memory a length out of range is an error; on a GPU
 * such an entry counts as empty, and FULMEN_FAULT_KV_LENGTHS is recorded. */
FULMEN_API fulmen_status fulmen_quantise(const fulmen_quantisation* quantisation, void* stream);

/* Which keys a query row of sparse latent attention sees: the indexer of DeepSeek-V3.2 (2025,
 * section 2.1). fulmen_indexer_init sets all arrays absent. The score of key j for row i is
 *
 *   s[i, j] = sum over heads h of weights[i, h] * max(0, dot(q[i, h], k[j]))
 *
 * over the keys that the row sees: the first kv_lengths[b], all where it is absent; with causal row
 * i of q_rows those up to kv_length - q_rows + i. indices[i] becomes the slots of the topk of
 * highest score, by rising key, then -1 where the row sees fewer: what a sparse call takes whose
 * cache has the pages of k (the option `slots`). Key j of request b has slot page * page_size + r,
 * as fulmen_append says; without a table b * kv_rows + j.
 *
 * Of equal scores the lower key goes first; NaN counts as higher than every number. k_scale
 * multiplies k; scales of q belong into the weights. Scores are sums in float32 in some order: each
 * is within (dim + heads + 2) * 2^-23 * A of its exact value, A being the same sum of magnitudes,
 * so no key that is left out is better than one that is chosen by more than their two bounds. */
typedef struct fulmen_indexer {
  size_t struct_size;

  fulmen_tensor q; /* (batch, head, q_row, dim); float32, float16, bfloat16, float8_e4m3fn */
  fulmen_tensor k; /* (batch, 1, kv_row, dim), or (page, 1, row of the page, dim); the dtype of
                      q, or float8_e4m3fn */
  fulmen_tensor k_scale;    /* float32, broadcast to k with a dim of 1; of float8 k, or absent: 1 */
  fulmen_tensor weights;    /* (batch, head, q_row); float32, float16, bfloat16 */
  fulmen_tensor kv_lengths; /* (batch) int32 or int64 */
  fulmen_tensor page_table; /* (batch, page of the request) int32 or int64, or (page) for all */
  fulmen_tensor indices;    /* (batch, q_row, topk) int32 or int64: written */

  int32_t causal; /* 0 (default) or 1 */
} fulmen_indexer;

FULMEN_API void fulmen_indexer_init_sized(fulmen_indexer* indexer, size_t struct_size);
static inline void fulmen_indexer_init(fulmen_indexer* indexer) { /* all absent */
  fulmen_indexer_init_sized(indexer, sizeof(fulmen_indexer));
}

/* Runs where q is: with all arrays in the memory of one GPU there, on the stream (NULL: its default
 * stream), in one kernel that allocates nothing, with a topk of at most 4096; NULL on the CPU. In
 * host memory a length or a page out of range is an error; on a GPU such a request counts as empty,
 * keys of such a page as hidden, and FULMEN_FAULT_KV_LENGTHS or FULMEN_FAULT_PAGES is recorded. */
FULMEN_API fulmen_status fulmen_mla_indexer(const fulmen_indexer* indexer, void* stream);

/* The boolean matrix that the options mean: the definition of their combination. Computed on the
 * CPU, from the extents of q, k and page_table and the contents of the arrays that mask (mask,
 * bias, lengths, offsets, ids, kv_start, positions, tree, segments), which are in host memory.
 * visible: FULMEN_BOOL (batch, head, q_row, kv_row); packed (sequence, head, longest q, longest
 * kv); beyond a sequence's lengths it is false. */
FULMEN_API fulmen_status fulmen_dense_mask(const fulmen_problem* problem,
                                           const fulmen_tensors* tensors,
                                           const fulmen_tensor* visible);

/* The same by blocks of block_q query rows and block_kv keys, at least 1 of each and counted in
 * their sequence, without looking at every pair: kinds, FULMEN_INT8 (batch, head, q_block,
 * kv_block), becomes 0 where a block has no visible pair, 2 where all are, and 1 for some, or where
 * the ends of the block do not tell. Masks of the caller's own are evaluated on intervals. exact:
 * what would be 1 is looked at pair by pair. Blocks and pairs beyond a sequence's lengths count as
 * not there; there are ceil(max_q / block_q) by ceil(max_kv / block_kv) blocks, max_q and max_kv
 * being the extents where the problem does not say them. With kv_start keys count from there. */
FULMEN_API fulmen_status fulmen_block_map(const fulmen_problem* problem,
                                          const fulmen_tensors* tensors, int64_t block_q,
                                          int64_t block_kv, int32_t exact,
                                          const fulmen_tensor* kinds);

/* Scores and masks of the caller's own, as text. score gives s', what s of section 1 becomes after
 * bias and ALiBi; mask is true where row i sees key j, beside every other mask. NULL: none; at
 * least one is given. In both:
 *
 *   i, j              the query row and the key, counted in their sequence
 *   p                 the position of row i: i + shift, or what positions says
 *   b, h, hk          the batch entry or sequence, the query head, its key/value head
 *   q_len, kv_len     of the sequence
 *   s                 the score; not in a mask
 *   name[i, j]        an element of capture n, the n-th of `captures`: an index for each axis, none
 *                     (name) of one element. An index out of range counts as the nearest inside
 *   $name             scalar n of the problem, the n-th of `scalars`: another value, the same plan
 *   + - * / // %      and comparisons (< <= > >= == !=, also a <= b < c), and, or, not, numbers,
 *                     true, false, parentheses; let name = value; in front gives a value a name
 *   min max abs exp log tanh sqrt floor, clamp(x, least, most), select(condition, a, b)
 *
 *   score: "s + table[h, clamp(j - p, -w, w) + 128]"      mask: "doc[i] == doc[j] and j <= p"
 *
 * Floats are computed in the type of sums. Integers have 64 bits and wrap; // and % are theirs and
 * round towards minus infinity, and are 0 where the divisor is; floor gives an integer. A mask is
 * decided first: what s' is for a hidden pair does not matter, NaN of a visible pair stays NaN.
 * Derivatives are exact, of s' with respect to s and to each floating-point capture (dcapture0 ..):
 * comparisons, floor and integers have 0; abs 0 at 0; min and max at a tie that of the first; clamp
 * 1 inside, 0 outside and at its ends; select that of its branch. Of a capture they are summed over
 * all visible pairs in float64 and rounded once.
 *
 * At most 256 operations each, 8 captures, 8 scalars. *expression: for fulmen_problem.expression,
 * the same for equal texts and names, in every process; it holds until as many calls of destroy.
 * What is not in the language is FULMEN_ERROR_ARGUMENT with its column and a caret. On a GPU the
 * gradients of captures are summed by atomics, which deterministic and batch_invariant refuse. */
FULMEN_API fulmen_status fulmen_expression_create(const char* score, const char* mask,
                                                  const char* const* captures, size_t num_captures,
                                                  const char* const* scalars, size_t num_scalars,
                                                  uint64_t* expression);
FULMEN_API void fulmen_expression_destroy(uint64_t expression); /* 0: nothing happens */

/* ------------------------------------------------------------------------------------------------
 * 7  Explanations
 *
 * Text is UTF-8, ends with a zero byte, and is cut where capacity ends. *needed (may be NULL) is
 * the number of bytes that the whole text takes, the zero byte included. buffer may be NULL when
 * capacity is 0.
 * ---------------------------------------------------------------------------------------------- */

/* Which implementation the call would use, why, and why each other one not, as one JSON object:
 * {"operation", "implementation", "backend", "reason", "rejected": [{"implementation", "reason"}],
 *  "tile": {"rows", "columns"} or null, "isa", "threads", "workspace_bytes", "pairs", "flops",
 *  "bytes", "intensity"}: pairs that interval masks leave visible; flops and bytes of the call.
 * For a GPU, instead of isa and threads:
 * {"device": {"name", "arch", "index" or null, "multiprocessors"},
 *  "kernels": [{"name", "registers", "spill_bytes", "shared_bytes", "threads", "blocks",
 *               "blocks_per_multiprocessor", "waves", "instructions", "origin", "findings"}],
 *  "roofline": {"peak_tflops", "bandwidth_gbps", "bound": "compute" or "memory", "time_us"},
 *  "notes": [sentences]}: what the assembler reported of each kernel (null where none could be
 * compiled; a note says why) and where its machine code came from ("compiled", "disk", "memory",
 * "bundle"); the time that the busier of arithmetic and memory takes at the card's peak.
 * Runs nothing and reads no array; for a GPU it compiles, like the call. */
FULMEN_API fulmen_status fulmen_explain(const fulmen_problem* problem,
                                        const fulmen_tensors* tensors, fulmen_operation operation,
                                        char* buffer, size_t capacity, size_t* needed);
FULMEN_API fulmen_status fulmen_plan_explain(const fulmen_plan* plan, char* buffer, size_t capacity,
                                             size_t* needed);

/* "major.minor.patch". Static storage. */
FULMEN_API const char* fulmen_version(void);

/* One JSON object: {"version", "commit", "kernels": a hash of the text of all GPU kernels,
 * "compiler", "build_type", "isas": [built], "isa": in use, "threads"}. Same text rules as above.
 */
FULMEN_API fulmen_status fulmen_build_info(char* buffer, size_t capacity, size_t* needed);

/* What this header holds, for bindings, as one JSON object:
 * {"version", "problem": the bytes that fulmen_problem_init writes, as hexadecimal digits,
 *  "sizes": {"problem", "tensors", "tensor", "merge_part", "append"}: of the structs, in bytes,
 *  "options": [{"name", "type": "float64", "int32", "int64", "uint64" or "text", "offset", "bytes",
 *    "default": null for NaN and NULL, "kind": "real", "flag" (0 or 1), "choice", "limit" (-1:
 *    none), "count", "word" (unsigned), "index" (-1: none) or "text",
 *    "choices": [names by number] of a choice, "least", "most": of other numbers, "doc"}],
 *  "arrays": [{"name": in fulmen_tensors, "word": what Python calls it, "offset", "axes",
 * "min_rank", "broadcast": how many leading axes may be 1, "dtypes", "role": "input", "result",
 * "upstream" or "gradient", "of": the parameter of a gradient, "differentiable", "forward_only":
 *    backward refuses it, "replaceable", "has_head_and_row"}]: inputs, results, inputs of the
 * backward pass, gradients, "dtypes": [{"name", "number", "bytes", "kind": "float", "bool" or
 * "int"}], "statuses": [{"name", "number"}], "backends": [names by number], "implementations":
 * [{"name", "number", "backend"}], "optimisations": [names by bit], "tile": [{"name", "least",
 * "most"}]: of fulmen_experimental.h}. dtypes of an array: "float", "q" (that of q),
 * "q_or_float32", "q_or_float32_or_sum" (sum: float64 for float64, else float32), "float32_or_sum",
 * "sum", "bool", "index" (int32, int64), "int64", "parameter" (that of what it is the gradient of).
 */
FULMEN_API fulmen_status fulmen_schema(char* buffer, size_t capacity, size_t* needed);

/* What this machine has for GPU calls, as one JSON object:
 * {"driver": {"version", "path"} or null, "driver_reason",
 *  "devices": [{"index", "name", "arch", "multiprocessors", "memory_bytes", "shared_bytes"}],
 *  "nvrtc": {"version", "path", "archs": [numbers]} or null, "nvrtc_reason",
 *  "cache": {"folder", "bytes", "entries", "limit_bytes", "note"},
 *  "bundle": {"path", "kernels"} or null, "device_names": [known to device_name]}.
 * Loads driver and compiler where they are; their absence is an answer, not an error. */
FULMEN_API fulmen_status fulmen_gpu_info(char* buffer, size_t capacity, size_t* needed);

/* ------------------------------------------------------------------------------------------------
 * 8  GPUs
 *
 * NVIDIA GPUs of compute capability 7.5 (Turing) and later, with driver 550 or later. Kernels are
 * compiled when a plan or call first needs them, by NVRTC, which is found in the toolkit and in
 * the Python packages nvidia-cuda-nvrtc, and kept on disk (FULMEN_CACHE_DIR) for all processes.
 * Neither driver nor NVRTC is needed, or loaded, for calls on the CPU.
 *
 * The caller's current device and context are never changed; work goes to the device's primary
 * context, which PyTorch, CuPy and the CUDA runtime share. A process that was forked after first
 * use is refused. Lengths and offsets on a device are never read by the host: kernels count an
 * entry that is out of range as empty and record a fault.
 * ---------------------------------------------------------------------------------------------- */

/* Faults, as bits: entries that were out of range. */
enum {
  FULMEN_FAULT_Q_OFFSETS = 1,
  FULMEN_FAULT_KV_OFFSETS = 2,
  FULMEN_FAULT_Q_LENGTHS = 4,
  FULMEN_FAULT_KV_LENGTHS = 8,
  FULMEN_FAULT_RNG = 16,        /* an rng offset outside 32 bits */
  FULMEN_FAULT_PAGES = 32,      /* an id in page_table that names no page or slot of k and v */
  FULMEN_FAULT_SLOTS = 64,      /* a slot of an append outside the cache or the request's pages */
  FULMEN_FAULT_POSITIONS = 128, /* a position outside the tables of a rotary embedding, or of a
                                   query row outside 32 bits: that counts as the nearest inside */
  FULMEN_FAULT_CAPTURES = 256,  /* an index of an expression outside the array that it reads: it
                                   counts as the nearest inside */
  FULMEN_FAULT_BLOCKS = 512,    /* an id in blocks that names no block of keys */
  FULMEN_FAULT_SEGMENTS = 1024  /* a segment outside its rows or beyond 31 bits, or two that share a
                                   row */
};

/* The faults that runs on a device recorded since the last such call, which clears them. Waits for
 * nothing: synchronise the stream first to be sure of its runs. */
FULMEN_API fulmen_status fulmen_device_faults(int32_t device, uint32_t* faults);

/* Writes the machine code of all kernels of GPU plans into one file, from which processes without
 * NVRTC run the same problems on the same architectures; where a problem is over a cache, also
 * those of fulmen_append_kv in its dtypes and of fulmen_merge, of 8 bits those of fulmen_quantise
 * that fill it, and with slots those of fulmen_mla_indexer for as many. Plans are made with
 * device_name, on a machine without a GPU too; making them is what takes time. */
FULMEN_API fulmen_status fulmen_bundle_write(const fulmen_plan* const* plans, size_t num_plans,
                                             const char* path);

/* Uses such a file from now on, before the cache and NVRTC. The environment variable FULMEN_BUNDLE
 * names one for the whole process. A file of another version of fulmen is refused where it was
 * made for other kernel sources. */
FULMEN_API fulmen_status fulmen_bundle_load(const char* path);

/* Removes every compiled kernel from the cache folder and from memory. Plans stay valid. */
FULMEN_API fulmen_status fulmen_cache_clear(void);

/* Files or folders in which NVRTC is looked for, after FULMEN_NVRTC and before the toolkits. Kept
 * as text until NVRTC is first needed; later calls change nothing. */
FULMEN_API fulmen_status fulmen_set_nvrtc_candidates(const char* const* paths, size_t num_paths);

/* ------------------------------------------------------------------------------------------------
 * 9  Everything owned
 *
 * These set state of the whole process; call them while no other fulmen call runs.
 * ---------------------------------------------------------------------------------------------- */

typedef enum fulmen_log_level {
  FULMEN_LOG_ERROR = 0,
  FULMEN_LOG_WARNING = 1,
  FULMEN_LOG_INFO = 2
} fulmen_log_level;

/* The library says what it does only here. NULL (the start) is silence, or lines in the file that
 * the environment variable FULMEN_LOG names ("stderr" too). message lives for the call, which may
 * come from any thread, several at once: kernels are compiled side by side. */
typedef void (*fulmen_log_callback)(fulmen_log_level level, const char* message, void* user);
FULMEN_API void fulmen_set_log(fulmen_log_callback callback, void* user);

/* How many threads the library's own pool uses. 0 (the start): FULMEN_NUM_THREADS, else one for
 * each processor that the process may use, by its affinity and the quota of its control group.
 * Results do not depend on it. */
FULMEN_API fulmen_status fulmen_set_num_threads(int32_t num_threads);

/* Bring your own pool instead (OpenMP, TBB, torch): parallel_for must call
 * body(context, i) for each i in [0, n), in any order, on at most `max_threads` threads at once,
 * and return when all are done. NULL returns to the library's own pool. */
typedef void (*fulmen_body)(void* context, int64_t index);
typedef void (*fulmen_parallel_for)(int64_t n, fulmen_body body, void* context, void* user);
FULMEN_API fulmen_status fulmen_set_parallel_for(fulmen_parallel_for parallel_for,
                                                 int32_t max_threads, void* user);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FULMEN_FULMEN_H_ */
