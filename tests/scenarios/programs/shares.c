/* Offers memory of a pool to other processes, which is refused. */
#include <stdio.h>

typedef struct { char bytes[64]; } Handle;
typedef void *Pool;
int cuInit(unsigned flags);
int cuDevicePrimaryCtxRetain(void **context, int device);
int cuCtxSetCurrent(void *context);
int cuDeviceGetDefaultMemPool(Pool *pool, int device);
int cuMemPoolExportToShareableHandle(void *out, Pool pool, int type, unsigned long long flags);
int cuMemPoolExportPointer(Handle *out, unsigned long long address);

int main(void) {
  void *context;
  Pool pool;
  Handle handle;
  if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context) || cuDeviceGetDefaultMemPool(&pool, 0))
    return 1;
  for (int i = 0; i < 3; ++i) printf("%d\n", cuMemPoolExportToShareableHandle(&handle, pool, 1, 0));
  printf("%d\n", cuMemPoolExportPointer(&handle, 4096));
  fflush(stdout);
  getchar();
  return 0;
}
