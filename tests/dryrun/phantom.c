/*
A CUDA device that is not there: so much of libcuda, libcudart, cuBLAS and NCCL that torch takes the machine for one
with an H200.

    memory      is reserved, never filled, and counted: what goes beyond PHANTOM_MIB fails as it would there
    kernels     are loaded (their registers and stack are read from the ELF image that ptxas made) and never run
    copies      of up to 64 KB are made, larger ones are not. New memory reads as zero, old memory as it was left
    products    cuBLAS counts them and leaves the result as it was
    ranks       NCCL answers as if all others had said the same as this one

So compilers and allocators do here what they would do there, and no number that a model computes means anything. cuDNN,
cuSOLVER, cuFFT and cuRAND have no stand-in: what calls them fails, or returns an error.

The functions are those that torch 2.11 with CUDA 13.0 calls. dryrun.py builds and preloads this file:

    gcc -shared -fPIC -O1 -w -Wl,-soname,libcuda.so.1 -o libcuda.so.1 phantom.c -ldl -lpthread
    LD_PRELOAD=$PWD/libcuda.so.1 LD_LIBRARY_PATH=$PWD TRITON_LIBCUDA_PATH=$PWD python ...

PHANTOM_MIB: memory of a device (143771); PHANTOM_GPUS: how many devices there are (1).
*/
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef void *ptr;
typedef unsigned long long u64;

enum { OK = 0, OUT_OF_MEMORY = 2, NO_FILE = 301, NOT_SUPPORTED = 801 };

/* C lets a function without parameters be called with any, so those that have nothing to do need none. */
#define SUCCEEDS(name) int name() { return OK; }
#define REFUSES(name) int name() { return NOT_SUPPORTED; }

/* What was done so far. Python reads these by ctypes. */
u64 phantom_launches;           /* kernels of torch's own library */
u64 phantom_triton;             /* kernels that were compiled on this machine */
u64 phantom_products;           /* matrix products of cuBLAS */
u64 phantom_collectives;        /* of NCCL */
u64 phantom_syncs;              /* times that the host waited for the device */
u64 phantom_replays;            /* of CUDA graphs */
u64 phantom_peak;               /* most bytes of the device that were taken at once, CUDA's own included */
u64 phantom_devices;            /* bit d: this process has used device d */

static __thread int device;

static void touch(void)
{
    phantom_devices |= 1ull << device;
}

static ptr handle(void)
{
    return calloc(1, 64);
}

/* ------------------------------------------------------------------------------------------------------------------
   Memory. One device is counted, since a process is one rank. */

#define MIB (1ull << 20)
#define SMALL (64 << 10)
#define MOST_BLOCKS 200000

/* CUDA's context and cuBLAS' workspace take about so much. */
static const u64 of_cuda = 600 * MIB;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static u64 used;
static struct { char *at; size_t size; } blocks[MOST_BLOCKS];
static int n_blocks;

static u64 memory_of_device(void)
{
    char *mib = getenv("PHANTOM_MIB");
    return (mib ? strtoull(mib, 0, 10) : 143771) * MIB;
}

static int devices(void)
{
    char *gpus = getenv("PHANTOM_GPUS");
    return gpus ? atoi(gpus) : 1;
}

static int take(size_t size)
{
    u64 room = memory_of_device() - of_cuda;
    pthread_mutex_lock(&lock);
    int fits = used + size <= room;
    if (fits)
        used += size;
    if (used + of_cuda > phantom_peak)
        phantom_peak = used + of_cuda;
    pthread_mutex_unlock(&lock);
    return fits ? OK : OUT_OF_MEMORY;
}

static void give_back(size_t size)
{
    pthread_mutex_lock(&lock);
    used -= size;
    pthread_mutex_unlock(&lock);
}

/* Addresses without memory behind them, until somebody writes there. */
static ptr reserve(size_t size)
{
    ptr p = mmap(0, size ? size : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? 0 : p;
}

static void remember(ptr p, size_t size)
{
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < n_blocks && blocks[i].at)
        i++;
    if (i < MOST_BLOCKS) {
        blocks[i].at = p;
        blocks[i].size = size;
        n_blocks = i == n_blocks ? i + 1 : n_blocks;
    }
    pthread_mutex_unlock(&lock);
}

/* The size of the block that begins at p, which is forgotten; 0 if there is none. */
static size_t forget(ptr p)
{
    size_t size = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; p && !size && i < n_blocks; i++)
        if (blocks[i].at == p) {
            size = blocks[i].size;
            blocks[i].at = 0;
        }
    pthread_mutex_unlock(&lock);
    return size;
}

static int on_device(const char *p)
{
    for (int i = 0; i < n_blocks; i++)
        if (blocks[i].at && p >= blocks[i].at && p < blocks[i].at + blocks[i].size)
            return 1;
    return 0;
}

int cudaMalloc(ptr *p, size_t size)
{
    touch();
    size_t whole = (size + 2 * MIB - 1) & ~(size_t)(2 * MIB - 1);   /* the driver deals in pieces of 2 MiB */
    *p = 0;
    if (take(whole))
        return OUT_OF_MEMORY;
    *p = reserve(whole);
    remember(*p, whole);
    return *p ? OK : OUT_OF_MEMORY;
}

int cudaFree(ptr p)
{
    size_t size = forget(p);
    if (size)
        munmap(p, size);
    give_back(size);
    return OK;
}

int cudaMallocAsync(ptr *p, size_t size, ptr stream) { return cudaMalloc(p, size); }
int cudaFreeAsync(ptr p, ptr stream) { return cudaFree(p); }

int cudaMemGetInfo(size_t *free_, size_t *total)
{
    *total = memory_of_device();
    *free_ = *total - of_cuda - used;
    return OK;
}

int cudaHostAlloc(ptr *p, size_t size, unsigned flags)
{
    *p = reserve(size);
    return *p ? OK : OUT_OF_MEMORY;
}

int cudaMallocHost(ptr *p, size_t size) { return cudaHostAlloc(p, size, 0); }

int cudaHostGetDevicePointer(ptr *on_it, ptr on_host, unsigned flags)
{
    *on_it = on_host;
    return OK;
}

struct attributes { int type, device; ptr device_ptr, host_ptr; long reserved[8]; };

int cudaPointerGetAttributes(struct attributes *a, const void *p)
{
    memset(a, 0, sizeof *a);
    a->device = -2;                                         /* of memory that CUDA has never seen */
    if (on_device(p)) {
        a->type = 2;
        a->device = 0;
        a->device_ptr = (ptr)p;
    }
    return OK;
}

static int copy(ptr to, const void *from, size_t size)
{
    touch();
    if (size <= SMALL)
        memmove(to, from, size);
    return OK;
}

int cudaMemcpy(ptr to, const void *from, size_t size, int kind)
{
    phantom_syncs++;
    return copy(to, from, size);
}

int cudaMemcpyAsync(ptr to, const void *from, size_t size, int kind, ptr stream) { return copy(to, from, size); }

int cudaMemcpyPeerAsync(ptr to, int there, const void *from, int here, size_t size, ptr stream)
{
    return copy(to, from, size);
}

int cudaMemset(ptr p, int value, size_t size)
{
    if (size <= SMALL)
        memset(p, value, size);
    return OK;
}

int cudaMemsetAsync(ptr p, int value, size_t size, ptr stream) { return cudaMemset(p, value, size); }

int cudaGetSymbolAddress(ptr *p, const void *symbol)
{
    static char room[SMALL];
    *p = room;
    return OK;
}

int cudaDeviceGetDefaultMemPool(ptr *pool, int d)
{
    *pool = (ptr)16;
    return OK;
}

int cudaMemPoolGetAttribute(ptr pool, int attribute, u64 *value)
{
    *value = 0;
    return OK;
}

/* Segments that grow: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True */
int cuMemGetAllocationGranularity(size_t *size, ptr properties, int option)
{
    *size = 2 * MIB;
    return OK;
}

int cuMemAddressReserve(ptr *p, size_t size, size_t alignment, u64 near, u64 flags)
{
    *p = reserve(size);
    remember(*p, size);
    return *p ? OK : OUT_OF_MEMORY;
}

int cuMemAddressFree(ptr p, size_t size)
{
    forget(p);
    munmap(p, size);
    return OK;
}

int cuMemCreate(u64 **piece, size_t size, ptr properties, u64 flags)
{
    if (take(size))
        return OUT_OF_MEMORY;
    *piece = handle();
    **piece = size;
    return OK;
}

int cuMemRelease(u64 *piece)
{
    give_back(*piece);
    free(piece);
    return OK;
}

SUCCEEDS(cudaFreeHost) SUCCEEDS(cudaHostRegister) SUCCEEDS(cudaHostUnregister)
SUCCEEDS(cudaMemcpy2DAsync) SUCCEEDS(cudaMemcpyToSymbol)
SUCCEEDS(cudaMemPoolSetAttribute) SUCCEEDS(cudaMemPoolSetAccess) SUCCEEDS(cudaMemPoolTrimTo)
SUCCEEDS(cuMemMap) SUCCEEDS(cuMemUnmap) SUCCEEDS(cuMemSetAccess) SUCCEEDS(cuMemsetD32Async)

/* ------------------------------------------------------------------------------------------------------------------
   The device: an NVIDIA H200, as its data sheet and deviceQuery have it. */

struct properties {                                         /* cudaDeviceProp of CUDA 13 */
    char name[256], uuid[16], luid[8];
    unsigned luid_mask;
    size_t memory, shared_of_block;
    int registers_of_block, warp;
    size_t pitch;
    int threads_of_block, threads[3], grid[3];
    size_t constant;
    int major, minor;
    size_t texture_alignment, texture_pitch;
    int processors, integrated, maps_host, textures[36];
    size_t surface_alignment;
    int concurrent, ecc, bus, slot, domain, tcc, engines, unified, bus_width, l2, l2_kept, threads_of_processor,
        priorities, l1_global, l1_local;
    size_t shared_of_processor;
    int registers_of_processor, managed, several, group, atomics, pageable, concurrent_managed, preempts, registered,
        cooperative;
    size_t shared_at_most;
    int more[100];
};

int cudaGetDeviceProperties(struct properties *p, int d)
{
    memset(p, 0, offsetof(struct properties, more) + 200);
    strcpy(p->name, "NVIDIA H200");
    p->memory = memory_of_device();
    p->shared_of_block = 49152;
    p->registers_of_block = 65536;
    p->warp = 32;
    p->pitch = 2147483647;
    p->threads_of_block = 1024;
    p->threads[0] = p->threads[1] = 1024;
    p->threads[2] = 64;
    p->grid[0] = 2147483647;
    p->grid[1] = p->grid[2] = 65535;
    p->constant = 65536;
    p->major = 9;
    p->texture_alignment = p->surface_alignment = 512;
    p->texture_pitch = 32;
    p->processors = 132;
    p->maps_host = p->concurrent = p->ecc = p->unified = p->priorities = p->l1_global = p->l1_local = 1;
    p->managed = p->preempts = p->cooperative = 1;
    p->bus = 1;
    p->engines = 3;
    p->bus_width = 6144;
    p->l2 = 60 * MIB;
    p->l2_kept = 39321600;
    p->threads_of_processor = 2048;
    p->shared_of_processor = 233472;
    p->registers_of_processor = 65536;
    p->shared_at_most = 232448;
    return OK;
}

int cudaGetDeviceProperties_v2(struct properties *p, int d) { return cudaGetDeviceProperties(p, d); }

/* By cudaDeviceAttr's numbers, which are CUdevice_attribute's too. */
int cudaDeviceGetAttribute(int *value, int attribute, int d)
{
    switch (attribute) {
    case 1: case 2: case 3: *value = 1024; break;           /* threads of a block, and along x and y */
    case 4: *value = 64; break;                             /* along z */
    case 5: *value = 2147483647; break;                     /* blocks of a grid along x */
    case 6: case 7: *value = 65535; break;                  /* along y and z */
    case 8: *value = 49152; break;                          /* shared memory of a block */
    case 9: *value = 65536; break;                          /* constant memory */
    case 10: *value = 32; break;                            /* threads of a warp */
    case 12: case 82: *value = 65536; break;                /* registers of a block, of a multiprocessor */
    case 13: *value = 1980000; break;                       /* kHz of the clock */
    case 16: *value = 132; break;                           /* multiprocessors */
    case 36: *value = 3201000; break;                       /* kHz of the memory's clock */
    case 37: *value = 6144; break;                          /* bits of its bus */
    case 38: *value = 60 * MIB; break;                      /* L2 cache */
    case 39: *value = 2048; break;                          /* threads of a multiprocessor */
    case 75: *value = 9; break;                             /* compute capability, major */
    case 76: *value = 0; break;                             /* and minor */
    case 81: *value = 233472; break;                        /* shared memory of a multiprocessor */
    case 97: *value = 232448; break;                        /* of a block that asks for more */
    case 106: *value = 32; break;                           /* blocks of a multiprocessor */
    case 111: *value = 1024; break;                         /* shared memory that CUDA keeps */
    case 31: case 41: case 79: case 80: case 83: case 95: case 102: case 115: case 120: *value = 1; break;
    default: *value = 0;
    }
    return OK;
}

int cudaGetDeviceCount(int *n)
{
    *n = devices();
    return OK;
}

int cudaGetDevice(int *d)
{
    *d = device;
    return OK;
}

int cudaSetDevice(int d)
{
    device = d;
    return OK;
}

int cudaRuntimeGetVersion(int *version)
{
    *version = 13000;
    return OK;
}

int cudaDriverGetVersion(int *version) { return cudaRuntimeGetVersion(version); }

int cudaDeviceCanAccessPeer(int *may, int a, int b)
{
    *may = 1;
    return OK;
}

int cudaDeviceGetStreamPriorityRange(int *low, int *high)
{
    *low = 0;
    *high = -5;
    return OK;
}

int cudaDeviceGetPCIBusId(char *text, int size, int d)
{
    snprintf(text, size, "0000:%02x:00.0", d + 1);
    return OK;
}

int cudaDeviceSynchronize(void)
{
    phantom_syncs++;
    return OK;
}

SUCCEEDS(cudaGetLastError) SUCCEEDS(cudaPeekAtLastError) SUCCEEDS(cudaDeviceEnablePeerAccess)
SUCCEEDS(cudaProfilerStart) SUCCEEDS(cudaProfilerStop)
REFUSES(cudaIpcGetMemHandle) REFUSES(cudaIpcOpenMemHandle) REFUSES(cudaIpcCloseMemHandle) REFUSES(cudaIpcGetEventHandle)

/* ------------------------------------------------------------------------------------------------------------------
   Streams, events and graphs. All work is done as soon as it is asked for. */

static ptr recorded;                                        /* the stream that a graph is recorded from */
static u64 recording;                                       /* number of that graph */

static int new_handle(ptr *p)
{
    *p = handle();
    return OK;
}

int cudaStreamCreate(ptr *stream) { return new_handle(stream); }
int cudaStreamCreateWithFlags(ptr *stream, unsigned flags) { return new_handle(stream); }
int cudaStreamCreateWithPriority(ptr *stream, unsigned flags, int priority) { return new_handle(stream); }
int cudaEventCreate(ptr *event) { return new_handle(event); }
int cudaEventCreateWithFlags(ptr *event, unsigned flags) { return new_handle(event); }

int cudaEventDestroy(ptr event)
{
    free(event);
    return OK;
}

int cudaStreamSynchronize(ptr stream)
{
    touch();
    phantom_syncs++;
    return OK;
}

int cudaEventSynchronize(ptr event)
{
    phantom_syncs++;
    return OK;
}

int cudaStreamGetPriority(ptr stream, int *priority)
{
    *priority = 0;
    return OK;
}

int cudaStreamAddCallback(ptr stream, void (*call)(ptr, int, ptr), ptr data, unsigned flags)
{
    call(stream, OK, data);
    return OK;
}

int cudaLaunchHostFunc(ptr stream, void (*call)(ptr), ptr data)
{
    call(data);
    return OK;
}

int cudaEventElapsedTime(float *ms, ptr from, ptr to)
{
    *ms = 1;                                                /* whoever times here learns nothing */
    return OK;
}

int cudaEventElapsedTime_v2(float *ms, ptr from, ptr to) { return cudaEventElapsedTime(ms, from, to); }

int cudaStreamBeginCapture(ptr stream, int mode)
{
    recorded = stream;
    recording++;
    return OK;
}

int cudaStreamEndCapture(ptr stream, ptr *graph)
{
    recorded = 0;
    return new_handle(graph);
}

int cudaStreamIsCapturing(ptr stream, int *is)
{
    *is = recorded && stream == recorded;
    return OK;
}

int cudaStreamGetCaptureInfo(ptr stream, int *is, u64 *id, ptr *graph, ptr *before, ptr *edges, size_t *n)
{
    if (id)
        *id = recording;
    if (graph)
        *graph = (ptr)32;
    if (before)
        *before = 0;
    if (edges)
        *edges = 0;
    if (n)
        *n = 0;
    return cudaStreamIsCapturing(stream, is);
}

int cudaGraphInstantiate(ptr *ready, ptr graph, u64 flags) { return new_handle(ready); }
int cudaGraphInstantiateWithFlags(ptr *ready, ptr graph, u64 flags) { return new_handle(ready); }

int cudaGraphLaunch(ptr ready, ptr stream)
{
    phantom_replays++;
    return OK;
}

int cudaGraphGetNodes(ptr graph, ptr *nodes, size_t *n)
{
    *n = 1;                                                 /* not empty, of which torch would warn */
    return OK;
}

int cudaGraphNodeGetDependencies(ptr node, ptr *before, ptr edges, size_t *n)
{
    *n = 0;
    return OK;
}

SUCCEEDS(cudaStreamDestroy) SUCCEEDS(cudaStreamQuery) SUCCEEDS(cudaStreamWaitEvent)
SUCCEEDS(cudaEventRecord) SUCCEEDS(cudaEventRecordWithFlags) SUCCEEDS(cudaEventQuery)
SUCCEEDS(cudaThreadExchangeStreamCaptureMode) SUCCEEDS(cudaGraphUpload) SUCCEEDS(cudaGraphDestroy)
SUCCEEDS(cudaGraphExecDestroy) SUCCEEDS(cudaGraphDebugDotPrint)

/* ------------------------------------------------------------------------------------------------------------------
   Kernels of torch's own library. */

struct function { size_t shared, constant, local; int threads, registers, ptx, binary, cache, dynamic, more[16]; };

int cudaFuncGetAttributes(struct function *f, const void *kernel)
{
    memset(f, 0, 96);
    f->threads = 1024;
    f->registers = 32;
    f->ptx = f->binary = 90;
    f->dynamic = 49152;
    return OK;
}

int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *kernel, int threads, size_t shared)
{
    *n = 2;
    return OK;
}

int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *k, int threads, size_t s, unsigned f)
{
    *n = 2;
    return OK;
}

int __cudaGetKernel(ptr *kernel, const void *function)
{
    *kernel = (ptr)function;
    return OK;
}

char __cudaInitModule(ptr *module) { return 1; }

#define LAUNCHES(name) int name() { phantom_launches++; return OK; }
LAUNCHES(__cudaLaunchKernel) LAUNCHES(cudaLaunchKernel) LAUNCHES(cudaLaunchKernelExC)
LAUNCHES(cudaLaunchCooperativeKernel)
SUCCEEDS(cudaFuncSetAttribute)

/* ------------------------------------------------------------------------------------------------------------------
   The driver, which Triton and Inductor call: kernels that were compiled on this machine. */

struct kernel { int registers, stack; };

#define AT(type, p) (*(type *)(p))

/* Registers and stack of the one kernel of a cubin, an ELF file: from its sections .nv.info. */
static void read_cubin(const unsigned char *image, struct kernel *k)
{
    if (memcmp(image, "\177ELF", 4))
        return;
    u64 table = AT(u64, image + 40);
    int width = AT(uint16_t, image + 58), sections = AT(uint16_t, image + 60), names = AT(uint16_t, image + 62);
    const char *text = (char *)image + AT(u64, image + table + (u64)names * width + 24);
    for (int i = 0; i < sections; i++) {
        const unsigned char *header = image + table + (u64)i * width;
        if (strcmp(text + AT(uint32_t, header), ".nv.info"))
            continue;
        const unsigned char *p = image + AT(u64, header + 24), *end = p + AT(u64, header + 32);
        while (p + 4 <= end) {
            int sized = p[0] == 4, kind = p[1], size = sized ? AT(uint16_t, p + 2) : 0;
            int number = size >= 8 ? AT(int, p + 8) : 0;
            if (kind == 0x11 && number > k->stack)          /* EIATTR_FRAME_SIZE */
                k->stack = number;
            if (kind == 0x2f && number > k->registers)      /* EIATTR_REGCOUNT */
                k->registers = number;
            p += 4 + size;
        }
    }
}

int cuModuleLoadData(ptr *module, const void *image)
{
    *module = calloc(1, sizeof(struct kernel));
    read_cubin(image, *module);
    return OK;
}

int cuModuleLoadDataEx(ptr *module, const void *image, unsigned n, ptr options, ptr values)
{
    return cuModuleLoadData(module, image);
}

int cuModuleLoad(ptr *module, const char *path)
{
    FILE *file = fopen(path, "rb");
    if (!file)
        return NO_FILE;
    fseek(file, 0, SEEK_END);
    long size = ftell(file);
    rewind(file);
    char *image = malloc(size);
    fread(image, 1, size, file);
    fclose(file);
    cuModuleLoadData(module, image);
    free(image);
    return OK;
}

int cuModuleGetFunction(ptr *function, ptr module, const char *name)
{
    *function = module;
    return OK;
}

int cuFuncGetAttribute(int *value, int attribute, struct kernel *k)
{
    switch (attribute) {
    case 0: *value = 1024; break;                           /* threads of a block */
    case 3: *value = k->stack; break;
    case 4: *value = k->registers; break;
    default: *value = 0;
    }
    return OK;
}

/* Attribute 8 is the shared memory that a kernel asks for: more than there is fails, and Triton tries less. */
int cuFuncSetAttribute(ptr function, int attribute, int value)
{
    return attribute == 8 && value > 232448;
}

int cuDeviceGet(int *d, int i)
{
    *d = i;
    return OK;
}

int cuDeviceGetName(char *text, int size, int d)
{
    snprintf(text, size, "NVIDIA H200");
    return OK;
}

int cuDeviceGetCount(int *n) { return cudaGetDeviceCount(n); }
int cuDeviceGetAttribute(int *value, int attribute, int d) { return cudaDeviceGetAttribute(value, attribute, d); }
int cuDriverGetVersion(int *version) { return cudaRuntimeGetVersion(version); }
int cuCtxGetDevice(int *d) { return cudaGetDevice(d); }

int cuDevicePrimaryCtxRetain(ptr *context, int d)
{
    *context = (ptr)64;
    return OK;
}

int cuDevicePrimaryCtxGetState(int d, unsigned *flags, int *active)
{
    *flags = 0;
    *active = 1;
    return OK;
}

int cuCtxGetCurrent(ptr *context)
{
    *context = (ptr)64;
    return OK;
}

int cuCtxGetLimit(size_t *value, int limit)
{
    *value = MIB;
    return OK;
}

int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, ptr function, int threads, size_t shared)
{
    *n = 2;
    return OK;
}

int cuOccupancyMaxActiveClusters(int *n, ptr function, ptr config)
{
    *n = 66;
    return OK;
}

int cuPointerGetAttribute(u64 *value, int attribute, u64 p)
{
    *value = p;
    return OK;
}

int cuGetErrorString(int error, const char **text)
{
    *text = "an error of the phantom device";
    return OK;
}

/* torch asks for functions of the driver by name. Those that are not here refuse. */
REFUSES(not_here)

int cudaGetDriverEntryPointByVersion(const char *name, ptr *function, unsigned version, u64 flags, int *found)
{
    *function = dlsym(RTLD_DEFAULT, name);
    if (!*function)
        *function = not_here;
    if (found)
        *found = 0;
    return OK;
}

int cudaGetDriverEntryPoint(const char *name, ptr *function, u64 flags, int *found)
{
    return cudaGetDriverEntryPointByVersion(name, function, 0, flags, found);
}

#define COMPILED(name) int name() { phantom_triton++; return OK; }
COMPILED(cuLaunchKernel) COMPILED(cuLaunchKernelEx) COMPILED(cuLaunchCooperativeKernel)
SUCCEEDS(cuInit) SUCCEEDS(cuCtxSetCurrent) SUCCEEDS(cuCtxSetLimit) SUCCEEDS(cuModuleUnload)
SUCCEEDS(cuFuncSetCacheConfig) SUCCEEDS(cuTensorMapEncodeTiled)
REFUSES(cuLinkCreate_v2) REFUSES(cuLinkAddData_v2) REFUSES(cuLinkComplete)

/* ------------------------------------------------------------------------------------------------------------------
   cuBLAS. */

int cublasCreate_v2(ptr *cublas) { return new_handle(cublas); }

int cublasGetMathMode(ptr cublas, int *mode)
{
    *mode = 0;
    return OK;
}

int cublasGetPointerMode_v2(ptr cublas, int *mode) { return cublasGetMathMode(cublas, mode); }

struct way { u64 algorithm[8]; size_t workspace; int state; float waves; int reserved[4]; };

int cublasLtMatmulAlgoGetHeuristic(ptr lt, ptr d, ptr a, ptr b, ptr c, ptr e, ptr p, int asked, struct way *w, int *n)
{
    memset(w, 0, sizeof *w);
    *n = 1;
    return OK;
}

#define MULTIPLIES(name) int name() { phantom_products++; return OK; }
MULTIPLIES(cublasGemmEx) MULTIPLIES(cublasGemmStridedBatchedEx) MULTIPLIES(cublasLtMatmul)
MULTIPLIES(cublasSgemm_v2) MULTIPLIES(cublasDgemm_v2) MULTIPLIES(cublasSgemmEx)
MULTIPLIES(cublasSgemmStridedBatched) MULTIPLIES(cublasDgemmStridedBatched)
MULTIPLIES(cublasSgemv_v2) MULTIPLIES(cublasDgemv_v2) MULTIPLIES(cublasDotEx) MULTIPLIES(cublasSdot_v2)
SUCCEEDS(cublasDestroy_v2) SUCCEEDS(cublasSetStream_v2) SUCCEEDS(cublasSetWorkspace_v2) SUCCEEDS(cublasSetMathMode)
SUCCEEDS(cublasSetPointerMode_v2) SUCCEEDS(cublasSetAtomicsMode)

/* ------------------------------------------------------------------------------------------------------------------
   NCCL: one rank, whose messages all others echo. */

struct group { int ranks, rank; };
typedef struct { char bytes[128]; } id;

static int join(struct group **g, int ranks, int rank)
{
    *g = handle();
    (*g)->ranks = ranks;
    (*g)->rank = rank;
    return OK;
}

int ncclGetUniqueId(id *i)
{
    memset(i, 7, sizeof *i);
    return OK;
}

int ncclCommInitRank(struct group **g, int n, id i, int rank) { return join(g, n, rank); }
int ncclCommInitRankConfig(struct group **g, int n, id i, int rank, ptr how) { return join(g, n, rank); }
int ncclCommInitRankScalable(struct group **g, int n, int rank, int k, ptr ids, ptr how) { return join(g, n, rank); }
int ncclCommSplit(struct group *g, int colour, int key, struct group **part, ptr how) { return join(part, g->ranks, key); }

int ncclCommCount(struct group *g, int *n)
{
    *n = g->ranks;
    return OK;
}

int ncclCommUserRank(struct group *g, int *rank)
{
    *rank = g->rank;
    return OK;
}

int ncclCommGetAsyncError(ptr g, int *error)
{
    *error = OK;
    return OK;
}

int ncclCommRegister(ptr g, ptr buffer, size_t size, ptr *registered) { return new_handle(registered); }
int ncclMemAlloc(ptr *p, size_t size) { return cudaMalloc(p, size); }
int ncclMemFree(ptr p) { return cudaFree(p); }

int ncclRedOpCreatePreMulSum(int *op)
{
    *op = 7;
    return OK;
}

/* Bytes of a number, by ncclDataType_t: int8, uint8, int32, uint32, int64, uint64, half, float, double, bf16, fp8. */
static size_t bytes(int type)
{
    static const int each[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return type < 12 ? each[type] : 1;
}

static int say(ptr to, const void *from, size_t n, int type)
{
    phantom_collectives++;
    return copy(to, from, n * bytes(type));
}

int ncclAllReduce(ptr from, ptr to, size_t n, int type, int op, ptr g, ptr stream) { return say(to, from, n, type); }
int ncclReduceScatter(ptr from, ptr to, size_t n, int type, int op, ptr g, ptr s) { return say(to, from, n, type); }
int ncclBroadcast(ptr from, ptr to, size_t n, int type, int root, ptr g, ptr s) { return say(to, from, n, type); }

int ncclAllGather(ptr from, char *to, size_t n, int type, struct group *g, ptr stream)
{
    phantom_collectives++;
    for (int rank = 0; rank < g->ranks; rank++)
        copy(to + rank * n * bytes(type), from, n * bytes(type));
    return OK;
}

#define SPEAKS(name) int name() { phantom_collectives++; return OK; }
SPEAKS(ncclBcast) SPEAKS(ncclReduce) SPEAKS(ncclSend) SPEAKS(ncclRecv) SPEAKS(ncclAlltoAll)
SUCCEEDS(ncclCommDestroy) SUCCEEDS(ncclCommAbort) SUCCEEDS(ncclCommFinalize) SUCCEEDS(ncclCommDeregister)
SUCCEEDS(ncclGroupStart) SUCCEEDS(ncclGroupEnd) SUCCEEDS(ncclRedOpDestroy)
