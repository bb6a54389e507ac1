/* SPDX-FileCopyrightText: fulmen contributors
 * SPDX-License-Identifier: Apache-2.0
 *
 * fulmen: what experiments need, and no program does: GPU kernels without one of their ideas, to
 * measure what it buys, and tiles of the caller's, to search for better ones; results stay right.
 * And loops that a CPU's rates are measured by. Unlike fulmen.h, this header may change with every
 * version.
 */
#ifndef FULMEN_FULMEN_EXPERIMENTAL_H_
#define FULMEN_FULMEN_EXPERIMENTAL_H_

#include <fulmen/fulmen.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Ideas of the fast kernels that can be left out one by one; fulmen_experiment.without. */
typedef enum fulmen_optimisation {
  FULMEN_SWIZZLE = 1,              /* shared tiles permuted, so that no memory banks collide */
  FULMEN_PIPELINE = 2,             /* several stages of tiles in flight */
  FULMEN_OVERLAP = 4,              /* products run under the softmax of another block */
  FULMEN_PING_PONG = 8,            /* warpgroups alternate at the tensor cores */
  FULMEN_LAZY_RESCALE = 16,        /* sums are rescaled only when a maximum grew much */
  FULMEN_WARP_SPECIALISATION = 32, /* some warps load, the others compute */
  FULMEN_FOLDED_SCALE = 64,        /* scale and shift of a score as one multiply-add */
  FULMEN_BLOCK_ORDER = 128,        /* the longest blocks of query rows first */
  FULMEN_FULL_BLOCKS = 256,        /* blocks that every row sees whole skip mask arithmetic */
  FULMEN_TENSOR_CORES = 512        /* products on tensor cores */
} fulmen_optimisation;

/* Of a plan for a GPU; all zero: nothing. */
typedef struct fulmen_experiment {
  size_t struct_size;
  uint32_t without; /* fulmen_optimisation, or'ed: what the kernel is made without; refused where it
                       cannot be left out */
  uint32_t reserved; /* 0 */
  const char* tile;  /* members of the kernel's config with numbers, "kv_rows=80 stages=2", in place
                        of those that the plan would choose; NULL or "": none. Members: warpgroups,
                        kv_rows, stages, q_slots, q_register_dims, heads_per_group, and as 0 or 1
                        ping_pong, overlap, stage_output, cache_hints. Only FULMEN_SM90 has a choice,
                        in the forward pass; a tile that its kernel cannot have is refused with the
                        reason, and so is one for which the compiler runs out of registers */
} fulmen_experiment;

/* Nothing left out, no tile. */
FULMEN_API void fulmen_experiment_init_sized(fulmen_experiment* experiment, size_t struct_size);
static inline void fulmen_experiment_init(fulmen_experiment* experiment) {
  fulmen_experiment_init_sized(experiment, sizeof(fulmen_experiment));
}

/* fulmen_plan_create with an experiment; it runs, explains and is destroyed like other plans. */
FULMEN_API fulmen_status fulmen_plan_create_experimental(const fulmen_problem* problem,
                                                         const fulmen_tensors* tensors,
                                                         fulmen_operation operation,
                                                         const fulmen_experiment* experiment,
                                                         fulmen_plan** plan);

/* Loops of the CPU's instruction set in use (fulmen_build_info) that do one thing as fast as it
 * can. */
typedef enum fulmen_cpu_loop {
  FULMEN_LOOP_MULTIPLY_ADDS = 1, /* of float32, in registers */
  FULMEN_LOOP_PAIR_PRODUCTS = 2, /* of bfloat16, in registers: FULMEN_ERROR_UNSUPPORTED where the
                                    instruction set has no such products */
  FULMEN_LOOP_READ = 3           /* of a buffer, each thread its part, in order */
} fulmen_cpu_loop;

/* Runs a loop `steps` times on each of the threads that a call would use, and returns when all are
 * done. buffer, bytes: what FULMEN_LOOP_READ reads; else NULL, 0. done: the floating-point
 * operations, or bytes read, of all threads together. The caller takes the time. */
FULMEN_API fulmen_status fulmen_cpu_run_loop(fulmen_cpu_loop loop, int64_t steps,
                                             const void* buffer, int64_t bytes, int64_t* done);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FULMEN_FULMEN_EXPERIMENTAL_H_ */
