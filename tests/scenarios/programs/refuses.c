/* Asks for what is refused by name: memory for other programs' graphics, and a way past the processor. */
#include <stdio.h>

int cuInit(unsigned flags);
int cuDevicePrimaryCtxRetain(void **context, int device);
int cuCtxSetCurrent(void *context);
int cuImportExternalMemory(void *out, const void *description);
int cuFlushGPUDirectRDMAWrites(int target, int scope);

int main(void) {
  void *context, *memory;
  if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context)) return 1;
  for (int i = 0; i < 3; ++i) printf("%d\n", cuImportExternalMemory(&memory, ""));
  printf("%d\n", cuFlushGPUDirectRDMAWrites(0, 100));
  fflush(stdout);
  getchar();
  return 0;
}
