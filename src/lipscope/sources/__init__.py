"""What a request names, read without torch: files of models, and texts."""

from lipscope.sources.checkpoints import (
    BEHIND_PADDING as BEHIND_PADDING,
    BUNDLED as BUNDLED,
    check_counts as check_counts,
    check_files as check_files,
    check_folder as check_folder,
    check_model as check_model,
    entries_in as entries_in,
    entries_of as entries_of,
    split_revision as split_revision,
    uncollected as uncollected,
)
from lipscope.sources.devices import CPU_ALONE as CPU_ALONE, check_device as check_device
from lipscope.sources.texts import (
    decode_text as decode_text,
    default_text as default_text,
    read_text as read_text,
    read_texts as read_texts,
)
