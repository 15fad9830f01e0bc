/* XXH64 against values of the xxhash package. */
#include "check.h"
#include "hash.h"

int main(void)
{
    unsigned char bytes[1000];
    for (int i = 0; i < 1000; i++)
        bytes[i] = (unsigned char)(i * 7);
    unsigned char count[101];
    for (int i = 0; i < 101; i++)
        count[i] = (unsigned char)i;
    CHECK(xd_hash("", 0) == UINT64_C(0xef46db3751d8e999));
    CHECK(xd_hash("a", 1) == UINT64_C(0xd24ec4f1a98c6e5b));
    CHECK(xd_hash("abc", 3) == UINT64_C(0x44bc2cf5ad770999));
    CHECK(xd_hash(count, 101) == UINT64_C(0xe99038495f85381e));
    CHECK(xd_hash(bytes, 1000) == UINT64_C(0x25275608a9cfc168));
    for (size_t i = 0; i < 1000; i++) { /* every byte counts */
        uint64_t before = xd_hash(bytes, 1000);
        bytes[i] ^= 1;
        CHECK(xd_hash(bytes, 1000) != before);
    }
    return 0;
}
