/* What NCCL does first in every process of a torchrun: offers its memory to the others. */
#include <stdio.h>

typedef struct { char bytes[64]; } Handle;
int cuInit(unsigned flags);
int cuDevicePrimaryCtxRetain(void **context, int device);
int cuCtxSetCurrent(void *context);
int cuMemAlloc_v2(unsigned long long *address, unsigned long long size);
int cuIpcGetMemHandle(Handle *handle, unsigned long long address);
int cuMemExportToShareableHandle(void *out, unsigned long long handle, int type, unsigned long long flags);

int main(void) {
  void *context;
  unsigned long long address;
  Handle handle;
  if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context) || cuMemAlloc_v2(&address, 4096))
    return 1;
  for (int i = 0; i < 3; ++i) printf("%d\n", cuIpcGetMemHandle(&handle, address));
  printf("%d\n", cuMemExportToShareableHandle(&handle, 0, 1, 0));
  fflush(stdout);
  getchar();
  return 0;
}
