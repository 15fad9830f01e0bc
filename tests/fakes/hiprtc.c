/*
 * A stand-in for AMD's run-time compiler, for tests: libhiprtc.so over NVRTC. --offload-arch=sm_90, the name that the
 * stand-in libamdhip64.so gives its devices, becomes --gpu-architecture=sm_90; the code is a cubin.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

enum { SUCCESS = 0, OUT_OF_MEMORY = 1, INVALID_OPTION = 5, INTERNAL_ERROR = 11 }; /* hiprtcResult, as NVRTC's */

typedef struct program_s *program;

#define NVRTC(X)                                                                                          \
    X(nvrtcVersion, (int *, int *))                                                                       \
    X(nvrtcCreateProgram, (program *, const char *, const char *, int, const char *const *, const char *const *)) \
    X(nvrtcDestroyProgram, (program *))                                                                   \
    X(nvrtcCompileProgram, (program, int, const char *const *))                                           \
    X(nvrtcGetProgramLogSize, (program, size_t *))                                                        \
    X(nvrtcGetProgramLog, (program, char *))                                                              \
    X(nvrtcGetCUBINSize, (program, size_t *))                                                             \
    X(nvrtcGetCUBIN, (program, char *))

static struct {
#define MEMBER(name, parameters) int(*name) parameters;
    NVRTC(MEMBER)
#undef MEMBER
} rtc;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static int complete;

static void load(void)
{
    void *library = dlopen("libnvrtc.so.13", RTLD_NOW);
    if (!library)
        library = dlopen("libnvrtc.so.12", RTLD_NOW);
    if (!library)
        return;
    void *symbol;
#define LOAD(name, parameters)                    \
    symbol = dlsym(library, #name);               \
    if (!symbol)                                  \
        return;                                   \
    memcpy(&rtc.name, &symbol, sizeof symbol);
    NVRTC(LOAD)
#undef LOAD
    complete = 1;
}

static int ready(void)
{
    pthread_once(&once, load);
    return complete;
}

#define FORWARD(name, parameters, call)            \
    EXPORT int name parameters;                    \
    int name parameters                            \
    {                                              \
        return ready() ? (call) : INTERNAL_ERROR;  \
    }

static int compile(program p, int count, const char *const *options)
{
    static const char hip[] = "--offload-arch=";
    int code = SUCCESS;
    char **ours = calloc((size_t)count + 1, sizeof *ours);
    if (!ours)
        return OUT_OF_MEMORY;
    for (int i = 0; i < count && code == SUCCESS; i++) {
        int is_arch = !strncmp(options[i], hip, sizeof hip - 1);
        size_t room = strlen(options[i]) + sizeof "--gpu-architecture=";
        ours[i] = malloc(room);
        if (!ours[i])
            code = OUT_OF_MEMORY;
        else if (is_arch && strncmp(options[i] + sizeof hip - 1, "sm_", 3))
            code = INVALID_OPTION;
        else
            snprintf(ours[i], room, "%s%s", is_arch ? "--gpu-architecture=" : "",
                     is_arch ? options[i] + sizeof hip - 1 : options[i]);
    }
    if (code == SUCCESS)
        code = rtc.nvrtcCompileProgram(p, count, (const char *const *)ours);
    for (int i = 0; i < count; i++)
        free(ours[i]);
    free(ours);
    return code;
}

EXPORT const char *hiprtcGetErrorString(int code);
const char *hiprtcGetErrorString(int code)
{
    switch (code) {
    case SUCCESS:
        return "HIPRTC_SUCCESS";
    case INVALID_OPTION:
        return "HIPRTC_ERROR_INVALID_OPTION";
    case 6:
        return "HIPRTC_ERROR_COMPILATION";
    default:
        return "HIPRTC_ERROR_INTERNAL_ERROR";
    }
}

FORWARD(hiprtcVersion, (int *major, int *minor), rtc.nvrtcVersion(major, minor))
FORWARD(hiprtcCreateProgram,
        (program * out, const char *source, const char *name, int count, const char *const *headers,
         const char *const *names),
        rtc.nvrtcCreateProgram(out, source, name, count, headers, names))
FORWARD(hiprtcDestroyProgram, (program * p), rtc.nvrtcDestroyProgram(p))
FORWARD(hiprtcCompileProgram, (program p, int count, const char *const *options), compile(p, count, options))
FORWARD(hiprtcGetProgramLogSize, (program p, size_t *bytes), rtc.nvrtcGetProgramLogSize(p, bytes))
FORWARD(hiprtcGetProgramLog, (program p, char *log), rtc.nvrtcGetProgramLog(p, log))
FORWARD(hiprtcGetCodeSize, (program p, size_t *bytes), rtc.nvrtcGetCUBINSize(p, bytes))
FORWARD(hiprtcGetCode, (program p, char *code), rtc.nvrtcGetCUBIN(p, code))
