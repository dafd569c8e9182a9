"""The page in Chinese, in simplified characters."""

TEXTS = {
    "comma": "、",
    # the prompts
    "heading": "八个提示词，八张图片",
    "hint": "用英语写下你想看到的画面。",
    "details": "它能画什么？",
    "skipped": "留空的框会跳过。",
    "keys": "按 Ctrl+Enter 生成，按 Esc 停止。",
    "prompt": "提示词",
    "prompt_placeholder": "留空则跳过",
    "copy_first": "把第一个复制到全部",
    "clear": "清空",
    "samples": "示例提示词",
    "tokens": "{count} / {limit} 个词元",
    "tokens_lost": "{tokens}，会被截掉：“{lost}”",
    "tokens_unknown": "{tokens}，不认识：“{words}”",
    "too_many_characters": "{count} 个字符，最多 {limit} 个",
    "list": "粘贴列表",
    "list_label": "每行一个提示词",
    "list_fill": "填入各框",
    "list_empty": "列表是空的：请每行写一个提示词。",
    "list_filled": "列表已填入各框。",
    "list_too_long": "列表有 {count} 个提示词，前 {limit} 个已填入各框。",
    # a box's own settings
    "own_fold": "提示词 {number} 的单独设置",
    "own_seed": "种子",
    "own_clear": "清除提示词 {number} 的单独设置",
    "as_common": "与全部相同",
    "label_steps": "{value} 步",
    "label_guidance": "引导强度 {value}",
    "label_seed": "种子 {value}",
    "label_spacing_own": "间隔：模型默认",
    "label_negative": "不含“{value}”",
    "label_negative_none": "无反向提示词",
    # a comparison
    "compare": "比较",
    "compare_hint": "用同一个种子把第一个提示词最多画八次，每次只改变一项。"
                    "各框中的内容会被替换。",
    "compare_what": "改变什么",
    "compare_samplers": "采样器（最多八个）",
    "compare_values": "数值（最多八个）",
    "compare_go": "绘制比较图",
    "compare_back": "恢复我的提示词",
    "compare_back_done": "比较之前的内容已放回各框。",
    # a picture that is read
    "read": "读取图片",
    "read_label": "本页或 A1111 生成的 PNG",
    "read_done": "{file} 的提示词、种子和设置已填入。",
    "read_size": "原图为 {width}×{height}，这里生成 {here_width}×{here_height}。",
    # the settings
    "settings": "设置",
    "negative": "反向提示词",
    "negative_help": "不希望出现在图片里的内容。",
    "steps": "步数",
    "steps_help": "步数越多，用时越长，画面越精细。",
    "guidance": "引导强度",
    "guidance_help": "数值越大，越严格遵循提示词；不超过 1 即关闭引导。",
    "sampler": "采样器",
    "sampler_help": "把噪声变成图片的方法。",
    "spacing": "间隔",
    "spacing_help": "各步在噪声上的分布方式。",
    "own": "模型默认",
    "own_hint": "单个提示词可以有自己的设置：点按输入框下方的滑块图标。",
    "own_value": "{value}（模型默认）",
    "size": "尺寸：{width}×{height} 像素，这是本服务器唯一已编译的尺寸。",
    "seed": "种子（-1 表示随机）",
    "seed_placeholder": "随机",
    "random": "随机",
    "reuse": "沿用上次",
    "reuse_none": "还没有可以重用的种子：先生成一次图片吧。",
    "generate": "生成",
    "stop": "停止",
    # drawing while somebody types
    "live": "实时",
    "live_help": "停止输入提示词后，很快重新绘制对应的图片。",
    # while it works
    "ready": "就绪",
    "starting": "正在开始…",
    "making": "正在生成{count}。",
    "one_picture": " 1 张图片",
    "pictures": " {count} 张图片",
    "compiling": "首次编译中…",
    "compiling_queued": "首次编译中…排在第 {position} 位。",
    "queued": "排在第 {position} 位",
    "queued_wait": "排在第 {position} 位，约 {time}后开始",
    "step": "第 {step} 步，共 {steps} 步",
    "step_left": "第 {step} 步，共 {steps} 步，约剩 {time}",
    "seconds": "{count} 秒",
    "minutes": "{count} 分钟",
    "done": "完成，用时 {seconds:.1f} 秒，种子 {seed}",
    "stopped": "已停止",
    "picture_ready": "第 {places} 张图片已完成。",
    "pictures_ready": "第 {places} 张图片已完成。",
    # the pictures
    "cell_waiting": "等待中",
    "cell_forming": "生成中",
    "cell_stopped": "已停止",
    "cell_seed": "种子 {seed}",
    "view": "查看第 {number} 张图片：{prompt}",
    "labelled": "{label}：{prompt}",
    "again": "重来",
    "again_help": "重来：填回第 {number} 张图片的提示词、种子和设置",
    "vary": "变体",
    "vary_help": "变体：把第 {number} 张图片的提示词填入所有框，种子依次递增",
    "png_help": "下载第 {number} 张图片（PNG）",
    "again_done": "第 {number} 张图片的提示词、种子和设置已填入。",
    "vary_done": "第 {number} 张图片的提示词已填入所有框，种子从它的种子起递增。",
    "zip": "全部下载（ZIP）",
    "grid": "下载为一张图",
    "link": "复制链接",
    "link_copied": "链接已复制",
    "link_prompt": "请复制此链接：",
    "link_opened": "链接中的提示词、种子和设置已填入。",
    "no_pictures": "还没有图片。",
    "gone": "图片已不在服务器上。",
    "viewer": "图片，全屏",
    "previous": "上一张",
    "next": "下一张",
    "close": "关闭",
    "download_png": "下载 PNG",
    # the history
    "history": "历史",
    "history_empty": "这里还没有内容：你生成的每张图片都会保存在这里。",
    "history_no_favourites": "还没有收藏：点图片的星标即可收藏。",
    "history_only": "只看收藏",
    "history_clear": "全部删除",
    "history_clear_sure": "要永久删除历史中的所有图片吗？收藏也会删除。",
    "history_more": "显示更多",
    "history_gone": "这张图片已不在你的历史中。",
    "history_again": "使用",
    "history_again_help": "使用：填入“{prompt}”的提示词、种子和设置",
    "history_again_done": "这张图片的提示词、种子和设置已填入。",
    "history_view_help": "全屏查看“{prompt}”",
    "history_save": "PNG",
    "history_save_help": "下载“{prompt}”（PNG）",
    "history_favourite_help": "收藏：“{prompt}”",
    "history_delete_help": "删除：“{prompt}”",
    "history_delete_sure": "要永久删除这张图片吗？",
    "history_deleted": "图片已删除。",
    "history_cleared": "所有图片均已删除。",
    # the server
    "about": "关于本服务器",
    "about_model": "模型",
    "about_devices": "设备",
    "about_precision": "精度",
    "about_sizes": "尺寸",
    "about_versions": "版本",
    "about_health": "状态",
    "sizes": "{width}×{height}，已编译",
    "no_tpu": "{devices}，这里没有 TPU，所以会稍慢一些",
    "healthy": "就绪",
    "compiles": "正在编译",
}

SENTENCES = {
    "With these settings a picture takes about {seconds} s here; Live is for pictures that "
    "take {limit} s at most.":
        "此处无法使用实时绘制：按当前设置，一张图片约需 {seconds} 秒，"
        "而实时绘制要求不超过 {limit} 秒。",
    # names of what is wrong, and whose it is
    " of prompt {number}": "提示词 {number} 的",
    "Prompt {number}": "提示词 {number}",
    "Prompt {number}: ": "提示词 {number}：",
    "The negative prompt{of}": "{of}反向提示词",
    "Steps{of}": "{of}步数",
    "Guidance{of}": "{of}引导强度",
    "Seed{of}": "{of}种子",
    "Sampler": "采样器",
    "Spacing": "间隔",
    "Height": "高度",
    "Width": "宽度",
    "a number as long as that": "那么长的数",
    # a request
    "There is no prompt yet: write what you would like to see in a box.":
        "还没有提示词：请在框里写下你想看到的画面。",
    "There are {count} prompts; at most {limit} fit.": "共有 {count} 个提示词，最多 {limit} 个。",
    "The prompts should be a list of texts.": "提示词应为文本列表。",
    "{name} should be text, not {kind}.": "{name}应为文本，而不是 {kind}。",
    "{name} has {count} characters; at most {limit} are accepted.":
        "{name}有 {count} 个字符，最多 {limit} 个。",
    "{name} should be a whole number, not {value}.": "{name}应为整数，而不是 {value}。",
    "{name} should be a number, not {value}.": "{name}应为数字，而不是 {value}。",
    "{name} should be from {least} to {most}, not {value}.":
        "{name}应在 {least} 到 {most} 之间，而不是 {value}。",
    "{name} {value}{of} is unknown; there are {known}.":
        "{of}{name} {value} 无法识别，可选：{known}。",
    "{sampler}{of} has no {spacing} spacing; it has {known}.":
        "{of}{sampler} 没有 {spacing} 间隔，可选：{known}。",
    "Pictures of {width}x{height} were asked for; this server makes {here_width}x{here_height}.":
        "请求的图片为 {width}×{height}，而本服务器生成 {here_width}×{here_height}。",
    "Unknown settings{of}: {names}.": "{of}未知设置：{names}。",
    "The own settings should be a list, one of each prompt.": "单独设置应为列表，每个提示词一项。",
    "There are {count} own settings for {places} prompts.":
        "共有 {places} 个提示词，却有 {count} 项单独设置。",
    "The own settings{of} should be values by name, not {value}.":
        "{of}单独设置应为按名称给出的值，而不是 {value}。",
    "The link cannot be read.": "无法读取该链接。",
    # a comparison
    "There is nothing to compare yet: give up to {limit} values.":
        "还没有可比较的值：最多可填 {limit} 个。",
    "There are {count} values to compare; at most {limit} fit.":
        "要比较的值有 {count} 个，最多 {limit} 个。",
    # what a sampler cannot do
    "{whose}{reason}": "{whose}{reason}",
    "{sampler} takes 1 to {total} steps, not {steps}.":
        "{sampler} 的步数应在 1 到 {total} 之间，而不是 {steps}。",
    "LCM takes at most {limit} steps here, not {steps}.":
        "LCM 在这里最多 {limit} 步，而不是 {steps}。",
    "{steps} steps are too many for {sampler} with {spacing} spacing: some of the {total} "
    "timesteps would repeat. Take fewer steps or another spacing.":
        "对使用 {spacing} 间隔的 {sampler} 来说，{steps} 步太多：{total} 个时间步中有些会重复。"
        "请减少步数或换一种间隔。",
    # a picture that is read
    "The file is larger than {limit} MiB.": "文件大于 {limit} MiB。",
    "The picture has far too many pixels.": "图片的像素太多。",
    "The file is not a PNG picture; no other kind carries settings here.":
        "这个文件不是 PNG 图片；其他格式的图片没有可以读取的设置。",
    "The file is not a whole PNG picture.": "该文件不是完整的 PNG 图片。",
    "The picture carries no settings: its PNG has no 'parameters' text.":
        "图片中没有设置：其 PNG 不含 parameters 文本。",
    "The file cannot be read ({reason}).": "无法读取该文件（{reason}）。",
    "The text is far too long to be a picture's settings.": "这段文本太长，不可能是图片的设置。",
    "The text holds no picture settings: no line begins with 'Steps:'.":
        "文本中没有图片的设置：没有以“Steps:”开头的行。",
    "The picture's settings lack {names}.": "图片的设置缺少：{names}。",
    "The picture's settings are garbled: {name}.": "图片的设置已损坏：{name}。",
    "The picture's size should be like 512x512, not {value}.":
        "图片的尺寸应写成 512x512 的形式，而不是 {value}。",
    # the server
    "The server is shutting down.": "服务器正在关闭。",
    "Too many people are waiting; please try again in a minute.":
        "等待的人太多，请稍后再试。",
    "The server failed; please try again.": "服务器出错，请重试。",
    "Compiling failed: {reason}": "编译失败：{reason}",
    "Making the pictures failed: {reason}": "生成图片失败：{reason}",
    # the history
    "{what} ({reason}).": "{what}（{reason}）。",
    "The history cannot be kept in {folder}": "无法在 {folder} 中保存历史",
    "The picture could not be added to the history": "无法将图片加入历史",
    "The history cannot be read or changed": "无法读取或更改历史",
    "An owner is a text of at least {least} random characters.":
        "所有者应为至少 {least} 个随机字符的文本。",
}
