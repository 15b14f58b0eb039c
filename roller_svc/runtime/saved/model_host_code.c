/* What follows is the same for every model. plan.bin has its steps. */

enum { COPY = -1, MAX_PATH_BYTES = 4096, ABORT_WORD = 1 };
static const size_t MAX_COPY_BYTES = (size_t)1 << 30; /* of a node: a pitch is less than 2 GiB */

struct roller_header {
  roller_word weights_bytes, read_weights_bytes, packed_bytes, arena_bytes;
  roller_word once, steps, fallback, addresses, zeros, before; /* rows of each table, in their order in the file */
};
struct roller_step {
  roller_word launch, bytes; /* COPY: bytes from the second address to the first */
  roller_word first_address, addresses, first_zero, zeros, first_before, before;
  roller_word is_early; /* it may start before the kernels that it comes after end, because it waits for them itself */
};
struct roller_address { roller_word slot, offset; };
struct roller_zero { roller_word slot, offset, bytes; };
struct roller_plan {
  struct roller_header *header;
  struct roller_step *once, *steps, *fallback;
  struct roller_address *addresses;
  struct roller_zero *zeros;
  roller_word *before; /* numbers of steps of the same table */
};
struct roller_parameters {
  CUdeviceptr values[MAX_OPERANDS];
  CUtensorMap maps[MAX_MAPS];
  void *pointers[MAX_OPERANDS + MAX_MAPS];
};

static struct roller_plan plan_of(roller_word *words) {
  struct roller_plan plan;
  plan.header = (struct roller_header *)words;
  plan.once = (struct roller_step *)(plan.header + 1);
  plan.steps = plan.once + plan.header->once;
  plan.fallback = plan.steps + plan.header->steps;
  plan.addresses = (struct roller_address *)(plan.fallback + plan.header->fallback);
  plan.zeros = (struct roller_zero *)(plan.addresses + plan.header->addresses);
  plan.before = (roller_word *)(plan.zeros + plan.header->zeros);
  return plan;
}

/* Returns the hash of words as model_host.py computes it. Words of which one has changed have another. */
static unsigned long long hash_of(const roller_word *words, size_t count) {
  unsigned long long hash = 0xcbf29ce484222325ull;
  for (size_t i = 0; i < count; i++) {
    hash = (hash ^ (unsigned long long)words[i]) * 0x100000001b3ull;
    hash ^= hash >> 32;
  }
  return hash;
}

/* Reads a file of that many bytes to memory that the caller frees. */
static CUresult read_whole(const char *folder, const char *name, roller_word bytes, void **content) {
  char path[MAX_PATH_BYTES];
  if (snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path) return CUDA_ERROR_FILE_NOT_FOUND;
  FILE *const file = fopen(path, "rb");
  if (!file) return CUDA_ERROR_FILE_NOT_FOUND;
  CUresult status = CUDA_SUCCESS;
  *content = malloc(bytes > 0 ? (size_t)bytes : 1);
  if (!*content)
    status = CUDA_ERROR_OUT_OF_MEMORY;
  else if (fread(*content, 1, (size_t)bytes, file) != (size_t)bytes || fgetc(file) != EOF)
    status = CUDA_ERROR_INVALID_IMAGE;
  fclose(file);
  return status;
}

static CUresult encode(CUtensorMap *map, const struct roller_map *view, CUdeviceptr address) {
  void *const start = (void *)(size_t)(address + view->offset);
  int driver = 0;
  CUresult status =
      view->is_im2col
          ? cuTensorMapEncodeIm2col(map, view->type, view->rank, start, view->extents, view->strides, view->lower, view->upper,
                                    view->box[0], view->box[1], view->steps, CU_TENSOR_MAP_INTERLEAVE_NONE, view->swizzle,
                                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
          : cuTensorMapEncodeTiled(map, view->type, view->rank, start, view->extents, view->strides, view->box, view->steps,
                                   CU_TENSOR_MAP_INTERLEAVE_NONE, view->swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (!status && view->is_small) status = cuDriverGetVersion(&driver);
  if (view->is_small && driver <= LAST_DRIVER_TO_FIX) map->opaque[1] &= ~((cuuint64_t)1 << 21); /* for larger tensors */
  return status;
}

static CUresult prepare(struct roller_parameters *given, const struct roller_plan *plan, const struct roller_step *step,
                        const CUdeviceptr *slots) {
  const struct roller_launch *const launch = launches + step->launch;
  CUresult status = CUDA_SUCCESS;
  for (roller_word i = 0; i < step->addresses; i++) {
    const struct roller_address *const at = plan->addresses + step->first_address + i;
    given->values[i] = slots[at->slot] + (CUdeviceptr)at->offset;
  }
  for (int i = 0; i < launch->args; i++) given->pointers[i] = &given->values[i];
  for (int i = 0; i < launch->maps && !status; i++) {
    const struct roller_map *const view = maps + launch->first_map + i;
    given->pointers[launch->args + i] = &given->maps[i];
    status = encode(&given->maps[i], view, given->values[view->operand]);
  }
  return status;
}

static CUresult start_launch(const CUfunction *functions, const struct roller_step *step, struct roller_parameters *given,
                             CUstream stream) {
  const struct roller_launch *const at = launches + step->launch;
  const CUfunction function = functions[step->launch];
  if (at->is_cooperative)
    return cuLaunchCooperativeKernel(function, at->grid[0], at->grid[1], at->grid[2], at->block[0], at->block[1], at->block[2],
                                     at->shared_bytes, stream, given->pointers);
  return cuLaunchKernel(function, at->grid[0], at->grid[1], at->grid[2], at->block[0], at->block[1], at->block[2],
                        at->shared_bytes, stream, given->pointers, NULL);
}

static CUresult run_in_stream(const CUfunction *functions, const struct roller_plan *plan, const struct roller_step *steps,
                              roller_word count, const CUdeviceptr *slots, CUstream stream) {
  struct roller_parameters given;
  CUresult status = CUDA_SUCCESS;
  for (const struct roller_step *step = steps; step < steps + count && !status; step++) {
    if (step->launch == COPY) {
      const struct roller_address *const at = plan->addresses + step->first_address;
      status = cuMemcpyDtoDAsync(slots[at[0].slot] + (CUdeviceptr)at[0].offset, slots[at[1].slot] + (CUdeviceptr)at[1].offset,
                                 (size_t)step->bytes, stream);
      continue;
    }
    for (roller_word i = 0; i < step->zeros && !status; i++) {
      const struct roller_zero *const at = plan->zeros + step->first_zero + i;
      status = cuMemsetD8Async(slots[at->slot] + (CUdeviceptr)at->offset, 0, (size_t)at->bytes, stream);
    }
    if (!status) status = prepare(&given, plan, step, slots);
    if (!status) status = start_launch(functions, step, &given, stream);
  }
  return status;
}

/* Adds a copy as a chain of nodes. */
static CUresult add_copy(CUgraph graph, CUcontext context, CUdeviceptr target, CUdeviceptr source, size_t bytes,
                         const CUgraphNode *before, size_t count, CUgraphNode *last) {
  CUresult status = CUDA_SUCCESS;
  for (size_t done = 0; done < bytes && !status; done += MAX_COPY_BYTES) {
    CUDA_MEMCPY3D copy;
    CUgraphNode node;
    memset(&copy, 0, sizeof copy);
    copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    copy.srcDevice = source + done;
    copy.dstDevice = target + done;
    copy.WidthInBytes = bytes - done < MAX_COPY_BYTES ? bytes - done : MAX_COPY_BYTES;
    copy.srcPitch = copy.dstPitch = copy.WidthInBytes;
    copy.srcHeight = copy.dstHeight = copy.Height = copy.Depth = 1;
    status = cuGraphAddMemcpyNode(&node, graph, done ? last : before, done ? 1 : count, &copy, context);
    *last = node;
  }
  return status;
}

static CUresult add_zeros(CUgraph graph, CUcontext context, CUdeviceptr target, size_t bytes, const CUgraphNode *before,
                          size_t count, CUgraphNode *node) {
  CUDA_MEMSET_NODE_PARAMS fill;
  memset(&fill, 0, sizeof fill);
  fill.dst = target;
  fill.elementSize = 1;
  fill.width = bytes;
  fill.height = 1;
  return cuGraphAddMemsetNode(node, graph, before, count, &fill, context);
}

/* Adds a launch. Headers before CUDA 12.3 have no programmatic edges: a node then starts when those before it have ended. */
static CUresult add_kernel(CUgraph graph, CUfunction function, const struct roller_launch *at, struct roller_parameters *given,
                           const CUgraphNode *before, size_t count, int is_early, CUgraphNode *node) {
  CUDA_KERNEL_NODE_PARAMS kernel;
  memset(&kernel, 0, sizeof kernel);
  kernel.func = function;
  kernel.gridDimX = at->grid[0];
  kernel.gridDimY = at->grid[1];
  kernel.gridDimZ = at->grid[2];
  kernel.blockDimX = at->block[0];
  kernel.blockDimY = at->block[1];
  kernel.blockDimZ = at->block[2];
  kernel.sharedMemBytes = at->shared_bytes;
  kernel.kernelParams = given->pointers;
#if CUDA_VERSION >= 12030
  if (is_early) {
    CUgraphEdgeData edge;
    CUresult status = cuGraphAddKernelNode(node, graph, NULL, 0, &kernel);
    memset(&edge, 0, sizeof edge);
    edge.from_port = CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC;
    edge.type = CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC;
    for (size_t i = 0; i < count && !status; i++) status = cuGraphAddDependencies_v2(graph, before + i, node, &edge, 1);
    return status;
  }
#endif
  (void)is_early;
  return cuGraphAddKernelNode(node, graph, before, count, &kernel);
}

/* Builds the graph of steps: a node for each fill, copy and kernel, an edge for each hazard. The driver copies parameters. */
static CUresult build_graph(const CUfunction *functions, const struct roller_plan *plan, const struct roller_step *steps,
                            roller_word count, const CUdeviceptr *slots, CUgraphExec *built) {
  CUgraphNode *const nodes = (CUgraphNode *)calloc((size_t)(2 * count + plan->header->zeros + 1), sizeof *nodes); /* of steps; before one; fills */
  CUgraphNode *const before = nodes + count, *const fills = before + count;
  struct roller_parameters given;
  CUcontext context = NULL;
  CUgraph graph = NULL;
  CUresult status = nodes ? cuCtxGetCurrent(&context) : CUDA_ERROR_OUT_OF_MEMORY;
  if (!status) status = cuGraphCreate(&graph, 0);
  for (roller_word number = 0; number < count && !status; number++) {
    const struct roller_step *const step = steps + number;
    const struct roller_address *const at = plan->addresses + step->first_address;
    for (roller_word i = 0; i < step->before; i++) before[i] = nodes[plan->before[step->first_before + i]];
    if (step->launch == COPY) {
      status = add_copy(graph, context, slots[at[0].slot] + (CUdeviceptr)at[0].offset,
                        slots[at[1].slot] + (CUdeviceptr)at[1].offset, (size_t)step->bytes, before, (size_t)step->before,
                        nodes + number);
      continue;
    }
    for (roller_word i = 0; i < step->zeros && !status; i++) {
      const struct roller_zero *const zero = plan->zeros + step->first_zero + i;
      status = add_zeros(graph, context, slots[zero->slot] + (CUdeviceptr)zero->offset, (size_t)zero->bytes, before,
                         (size_t)step->before, fills + i);
    }
    if (!status) status = prepare(&given, plan, step, slots);
    if (!status)
      status = add_kernel(graph, functions[step->launch], launches + step->launch, &given, step->zeros ? fills : before,
                          (size_t)(step->zeros ? step->zeros : step->before), (int)step->is_early, nodes + number);
  }
  if (!status) status = cuGraphInstantiateWithFlags(built, graph, 0);
  if (graph) cuGraphDestroy(graph);
  free(nodes);
  return status;
}

/* Finds out whether a cooperative launch has more blocks than are on the device at once. */
static CUresult find_fallback(const CUfunction *functions, int *uses_fallback) {
  CUdevice device;
  int cores = 0, can_cooperate = 0, blocks = 0;
  CUresult status = cuCtxGetDevice(&device);
  if (!status) status = cuDeviceGetAttribute(&cores, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
  if (!status) status = cuDeviceGetAttribute(&can_cooperate, CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, device);
  *uses_fallback = 0;
  for (int i = 0; i < LAUNCHES && !status; i++) {
    const struct roller_launch *const at = launches + i;
    if (!at->is_cooperative) continue;
    status = cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, functions[i], (int)(at->block[0] * at->block[1] * at->block[2]),
                                                         at->shared_bytes);
    if (!can_cooperate || (long long)blocks * cores < (long long)at->grid[0] * at->grid[1] * at->grid[2]) *uses_fallback = 1;
  }
  return status;
}

/* Uploads the weights, runs what depends on them alone, and keeps the weights that calls read. */
static CUresult load_weights(struct MODEL *model, const struct roller_plan *plan, const char *folder) {
  const struct roller_header *const header = plan->header;
  void *content = NULL;
  CUdeviceptr whole = 0, slots[SLOTS] = {0};
  CUresult status = read_whole(folder, WEIGHTS_FILE, header->weights_bytes, &content);
  if (!status) status = cuMemAlloc(&whole, (size_t)(header->weights_bytes + 1));
  if (!status) status = cuMemcpyHtoD(whole, content, (size_t)header->weights_bytes);
  if (!status) status = cuMemAlloc(&model->packed, (size_t)(header->packed_bytes + 1));
  if (!status) status = cuMemAlloc(&model->arena, (size_t)(header->arena_bytes + 1));
  free(content);
  slots[0] = whole;
  slots[1] = model->packed;
  if (!status) status = run_in_stream(model->functions, plan, plan->once, header->once, slots, NULL);
  if (!status) status = cuCtxSynchronize();
  if (header->read_weights_bytes == header->weights_bytes) {
    model->weights = whole;
    return status;
  }
  if (!status) status = cuMemAlloc(&model->weights, (size_t)(header->read_weights_bytes + 1));
  if (!status) status = cuMemcpyDtoD(model->weights, whole, (size_t)header->read_weights_bytes);
  if (whole) cuMemFree(whole);
  return status;
}

CUresult MODEL_open(struct MODEL *model, const char *folder) {
  struct roller_plan plan;
  char path[MAX_PATH_BYTES];
  CUresult status;
  memset(model, 0, sizeof *model);
  status = read_whole(folder, PLAN_FILE, PLAN_WORDS * (roller_word)sizeof(roller_word), &model->plan);
  if (!status && hash_of((roller_word *)model->plan, PLAN_WORDS) != PLAN_HASH) status = CUDA_ERROR_INVALID_IMAGE;
  if (!status) plan = plan_of((roller_word *)model->plan);
  for (int i = 0; i < MODULES && !status; i++) {
    if (snprintf(path, sizeof path, "%s/%s", folder, module_files[i]) >= (int)sizeof path) status = CUDA_ERROR_FILE_NOT_FOUND;
    if (!status) status = cuModuleLoad(&model->modules[i], path);
  }
  for (int i = 0; i < LAUNCHES && !status; i++) {
    status = cuModuleGetFunction(&model->functions[i], model->modules[launches[i].module], launches[i].entry);
    if (!status && launches[i].asks_for_shared)
      status = cuFuncSetAttribute(model->functions[i], CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                  (int)launches[i].shared_bytes);
  }
  if (!status) status = find_fallback(model->functions, &model->uses_fallback);
  if (!status && model->uses_fallback && !plan.header->fallback) status = CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
  if (!status) status = load_weights(model, &plan, folder);
  if (status) MODEL_close(model);
  return status;
}

CUresult MODEL_call(struct MODEL *model, const CUdeviceptr *inputs, const CUdeviceptr *outputs, CUstream stream) {
  const struct roller_plan plan = plan_of((roller_word *)model->plan);
  const struct roller_step *const steps = model->uses_fallback ? plan.fallback : plan.steps;
  const roller_word count = model->uses_fallback ? plan.header->fallback : plan.header->steps;
  unsigned int state[STATE_WORDS];
  CUdeviceptr slots[SLOTS];
  CUresult status = CUDA_SUCCESS;
  slots[0] = model->weights;
  slots[1] = model->packed;
  slots[2] = model->arena;
  for (int i = 0; i < MODEL_INPUTS; i++) slots[3 + i] = inputs[i];
  for (int i = 0; i < MODEL_OUTPUTS; i++) slots[3 + MODEL_INPUTS + i] = outputs[i];
  if (IS_GRAPH || model->uses_fallback) {
    if (model->graph && memcmp(slots, model->slots, sizeof slots)) {
      cuGraphExecDestroy(model->graph);
      model->graph = NULL;
    }
    if (!model->graph) status = build_graph(model->functions, &plan, steps, count, slots, &model->graph);
    memcpy(model->slots, slots, sizeof slots);
    return status ? status : cuGraphLaunch(model->graph, stream);
  }
  status = run_in_stream(model->functions, &plan, steps, count, slots, stream);
  for (const struct roller_step *step = steps; step < steps + count && !status; step++) {
    if (step->launch == COPY || !launches[step->launch].is_cooperative) continue;
    const struct roller_zero *const events = plan.zeros + step->first_zero;
    status = cuStreamSynchronize(stream);
    if (!status) status = cuMemcpyDtoH(state, slots[events->slot] + (CUdeviceptr)events->offset, sizeof state);
    if (!status && state[ABORT_WORD]) status = CUDA_ERROR_LAUNCH_TIMEOUT;
  }
  return status;
}

void MODEL_close(struct MODEL *model) {
  if (model->graph) cuGraphExecDestroy(model->graph);
  if (model->weights) cuMemFree(model->weights);
  if (model->packed) cuMemFree(model->packed);
  if (model->arena) cuMemFree(model->arena);
  for (int i = 0; i < MODULES; i++)
    if (model->modules[i]) cuModuleUnload(model->modules[i]);
  free(model->plan);
  memset(model, 0, sizeof *model);
}
