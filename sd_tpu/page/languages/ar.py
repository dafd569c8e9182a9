"""The page in Arabic. Where left and right would be mixed up, LRI and PDI (U+2066 and U+2069) hold
together what is read from the left.
"""

TEXTS = {
    "comma": "، ",
    # the prompts
    "heading": "ثمانية أوصاف، ثماني صور",
    "hint": "اكتب بالإنجليزية ما تودّ أن تراه.",
    "details": "ماذا يستطيع أن يرسم؟",
    "skipped": "الخانات الفارغة تُتجاوز.",
    "keys": "يبدأ الإنشاء بالمفتاحين \u2066Ctrl+Enter\u2069 ويتوقف بالمفتاح Esc.",
    "prompt": "الوصف",
    "prompt_placeholder": "إن تُركت فارغة تُتجاوز",
    "copy_first": "نسخ الأول إلى الكل",
    "clear": "مسح",
    "samples": "أوصاف للتجربة",
    "undo": "تراجع",
    "redo": "إعادة",
    "undone": "عادت الخانات كما كانت.",
    "tokens": "الرموز: {count} من {limit}",
    "tokens_lost": "{tokens}، سيُقتطع: «{lost}»",
    "tokens_unknown": "{tokens}، كلمات مجهولة: «{words}»",
    "too_many_characters": "الأحرف: {count}، والحد الأقصى {limit}",
    "list": "لصق قائمة",
    "list_label": "وصف واحد في كل سطر",
    "list_fill": "ملء الخانات",
    "list_empty": "القائمة فارغة: اكتب وصفًا واحدًا في كل سطر.",
    "list_filled": "القائمة الآن في الخانات.",
    "list_too_long": "عدد الأوصاف في القائمة {count}، ووُضع أول {limit} منها في الخانات.",
    # a box's own settings
    "own_fold": "الإعدادات الخاصة بالوصف {number}",
    "own_seed": "البذرة",
    "own_clear": "مسح الإعدادات الخاصة بالوصف {number}",
    "as_common": "كما للجميع",
    "label_steps": "الخطوات {value}",
    "label_guidance": "قوة التوجيه {value}",
    "label_guidance_start": "التوجيه من {value}",
    "label_guidance_stop": "التوجيه حتى {value}",
    "label_cache_interval": "فاصل التخزين المؤقت {value}",
    "label_seed": "البذرة {value}",
    "label_spacing_own": "التباعد: قيمة النموذج",
    "label_negative": "من دون “{value}”",
    "label_negative_none": "بلا وصف سلبي",
    # a comparison
    "compare": "مقارنة",
    "compare_hint": "ترسم الوصف الأول حتى ثماني مرات بالبذرة نفسها مع تغيير شيء واحد كل مرة. "
                    "ويحل ذلك محل ما في الخانات.",
    "compare_what": "ما الذي يتغير",
    "compare_samplers": "طرق أخذ العينات، ثمان على الأكثر",
    "compare_values": "القيم، ثمان على الأكثر",
    "compare_go": "رسم المقارنة",
    # a picture that is read
    "read": "قراءة صورة",
    "read_label": "صورة PNG أُنشئت هنا أو في A1111",
    "read_done": "وُضعت في الخانات أوصاف {file} وبذرتها وإعداداتها.",
    "read_size": "أُنشئت بمقاس \u2066{width}×{height}\u2069، "
                 "والصور هنا بمقاس \u2066{here_width}×{here_height}\u2069.",
    "read_downsampling": "رُسمت بتقليل عينات الرموز {there}، وهو يُحدَّد عند تشغيل "
                         "الصفحة، وقيمته هنا {here}.",
    # the settings
    "settings": "الإعدادات",
    "negative": "الوصف السلبي",
    "negative_help": "ما لا ينبغي أن يظهر في الصور.",
    "steps": "الخطوات",
    "steps_help": "كلما زادت طال الوقت وازدادت الصورة إتقانًا.",
    "guidance": "قوة التوجيه",
    "guidance_help": "كلما زادت اشتدّ الالتزام بالوصف؛ و1 يعطّله.",
    "sampler": "طريقة أخذ العينات",
    "sampler_help": "الطريقة التي تحوّل التشويش إلى صورة.",
    "spacing": "التباعد",
    "spacing_help": "كيف تتوزع الخطوات على التشويش.",
    "faster_hint": "أسرع، لكن الصور تختلف قليلًا:",
    "guidance_start": "بدء التوجيه",
    "guidance_start_help": "بعد هذه الحصة من الخطوات؛ 0 يعني من البداية.",
    "guidance_stop": "توقف التوجيه",
    "guidance_stop_help": "بعد هذه الحصة من الخطوات؛ 1 يعني حتى النهاية.",
    "cache_interval": "فاصل التخزين المؤقت",
    "cache_interval_help": "1 معطّل؛ وعند 3 يُحسب النموذج كاملًا مرة كل ثلاث؛ والحد 10.",
    "exact_again": "العودة إلى الصور الدقيقة",
    "own": "قيمة النموذج",
    "own_hint": "يمكن أن تكون لوصف واحد إعداداته الخاصة: أشرطة التمرير أسفل خانته.",
    "own_value": "{value} (قيمة النموذج)",
    "size": "المقاس: \u2066{width}×{height}\u2069 بكسل، وهو الوحيد المُجهَّز في هذا الخادم.",
    "seed": "البذرة (\u2066-1\u2069 لبذرة جديدة)",
    "seed_placeholder": "بذرة جديدة",
    "random": "عشوائية",
    "reuse": "البذرة السابقة",
    "reuse_none": "لا توجد بذرة لإعادة استخدامها بعد: لم يُولَّد شيء.",
    "generate": "إنشاء",
    "stop": "إيقاف",
    # drawing while somebody types
    "live": "رسم فوري",
    "live_help": "تُرسم الصورة من جديد بعد لحظة من توقفك عن كتابة وصفها.",
    # while it works
    "ready": "جاهز",
    "starting": "جارٍ البدء…",
    "making": "جارٍ إنشاء {count}.",
    "one_picture": "صورة واحدة",
    "pictures": "الصور، وعددها {count}",
    "compiling": "جارٍ التجهيز للمرة الأولى…",
    "compiling_queued": "جارٍ التجهيز للمرة الأولى… رقمك في قائمة الانتظار: {position}.",
    "queued": "رقمك في قائمة الانتظار: {position}",
    "queued_wait": "رقمك في قائمة الانتظار: {position}، يبدأ بعد نحو {time}",
    "step": "الخطوة {step} من {steps}",
    "step_left": "الخطوة {step} من {steps}، بقي نحو {time}",
    "seconds": "{count} ث",
    "minutes": "{count} د",
    "done": "اكتمل خلال {seconds:.1f} ث، البذرة {seed}",
    "stopped": "أُوقف",
    "picture_ready": "الصورة {places} جاهزة.",
    "pictures_ready": "الصور {places} جاهزة.",
    # the pictures
    "cell_waiting": "في الانتظار",
    "cell_forming": "قيد الرسم",
    "cell_stopped": "أُوقفت",
    "cell_seed": "البذرة {seed}",
    "view": "عرض الصورة {number}: {prompt}",
    "labelled": "{label}: {prompt}",
    "again": "إعادة",
    "again_help": "إعادة: وضع وصف الصورة {number} وبذرتها وإعداداتها في الخانات",
    "vary": "تنويع",
    "vary_help": "تنويع: وضع وصف الصورة {number} في كل الخانات ببذور متتالية",
    "png_help": "تنزيل الصورة {number} بصيغة PNG",
    "again_done": "وُضع في الخانات وصف الصورة {number} وبذرتها وإعداداتها.",
    "vary_done": "وُضع وصف الصورة {number} في كل الخانات، والبذور متتالية ابتداءً من بذرتها.",
    "zip": "تنزيل الكل (ZIP)",
    "grid": "تنزيل في صورة واحدة",
    "link": "نسخ الرابط",
    "link_copied": "نُسخ الرابط",
    "link_prompt": "انسخ هذا الرابط:",
    "link_opened": "وُضعت في الخانات أوصاف الرابط وبذرته وإعداداته.",
    "no_pictures": "لا توجد صور بعد.",
    "gone": "لم تعد الصور موجودة على الخادم.",
    "viewer": "صورة بملء الشاشة",
    "previous": "الصورة السابقة",
    "next": "الصورة التالية",
    "close": "إغلاق",
    "download_png": "تنزيل PNG",
    # the history
    "history": "السجل",
    "history_empty": "لا شيء بعد: كل صورة تنشئها تُحفظ هنا.",
    "history_no_favourites": "لا توجد صور مفضلة بعد: اضغط نجمة الصورة لتفضيلها.",
    "history_only": "المفضلة فقط",
    "history_clear": "حذف الكل",
    "history_clear_sure": "هل تريد حذف كل صور سجلك نهائيًا، بما فيها المفضلة؟",
    "history_more": "عرض المزيد",
    "history_gone": "لم تعد هذه الصورة في سجلك.",
    "history_again": "تطبيق",
    "history_again_help": "تطبيق: وضع وصف «{prompt}» وبذرتها وإعداداتها في الخانات",
    "history_again_done": "وُضع في الخانات وصف الصورة وبذرتها وإعداداتها.",
    "history_view_help": "عرض «{prompt}» بملء الشاشة",
    "history_save": "PNG",
    "history_save_help": "تنزيل «{prompt}» بصيغة PNG",
    "history_favourite_help": "تفضيل: «{prompt}»",
    "history_delete_help": "حذف: «{prompt}»",
    "history_delete_sure": "هل تريد حذف هذه الصورة نهائيًا؟",
    "history_deleted": "حُذفت الصورة.",
    "history_cleared": "حُذفت كل الصور.",
    # the server
    "about": "عن هذا الخادم",
    "about_model": "النموذج",
    "about_devices": "الأجهزة",
    "about_precision": "الدقة",
    "about_downsampling": "تقليل عينات الرموز",
    "about_sizes": "المقاسات",
    "about_versions": "الإصدارات",
    "about_health": "الحالة",
    "sizes": "\u2066{width}×{height}\u2069، مُجهَّز",
    "no_tpu": "{devices}، لا يوجد هنا TPU، لذا يستغرق الأمر وقتًا أطول قليلًا",
    "healthy": "جاهز",
    "compiles": "جارٍ التجهيز",
}

SENTENCES = {
    "With these settings a picture takes about {seconds} s here; Live is for pictures that "
    "take {limit} s at most.":
        "الرسم الفوري غير متاح هنا: تستغرق الصورة بهذه الإعدادات نحو {seconds} ث، "
        "وهو للصور التي لا تستغرق أكثر من {limit} ث.",
    # names of what is wrong, and whose it is
    " of prompt {number}": " (الوصف {number})",
    "Prompt {number}": "الوصف {number}",
    "Prompt {number}: ": "الوصف {number}: ",
    "The negative prompt{of}": "الوصف السلبي{of}",
    "Steps{of}": "الخطوات{of}",
    "Guidance{of}": "قوة التوجيه{of}",
    "Seed{of}": "البذرة{of}",
    "Guidance start{of}": "بدء التوجيه{of}",
    "Guidance stop{of}": "توقف التوجيه{of}",
    "Cache interval{of}": "فاصل التخزين المؤقت{of}",
    "Guidance{of} should start before it stops, not start at {start} and stop at {stop}.":
        "التوجيه{of}: يجب أن يبدأ قبل أن يتوقف، لا أن يبدأ عند {start} ويتوقف عند {stop}.",
    "Sampler": "طريقة أخذ العينات",
    "Spacing": "التباعد",
    "Height": "الارتفاع",
    "Width": "العرض",
    "a number as long as that": "عدد بهذا الطول",
    # a request
    "There is no prompt yet: write what you would like to see in a box.":
        "لا يوجد وصف بعد: اكتب في إحدى الخانات ما تودّ أن تراه.",
    "There are {count} prompts; at most {limit} fit.":
        "عدد الأوصاف {count}، والحد الأقصى {limit}.",
    "The prompts should be a list of texts.": "يجب أن تكون الأوصاف قائمة من النصوص.",
    "{name} should be text, not {kind}.": "{name}: يجب إدخال نص، لا {kind}.",
    "{name} has {count} characters; at most {limit} are accepted.":
        "{name}: عدد الأحرف {count}، والحد الأقصى {limit}.",
    "{name} should be a whole number, not {value}.": "{name}: يجب إدخال عدد صحيح، لا {value}.",
    "{name} should be a number, not {value}.": "{name}: يجب إدخال عدد، لا {value}.",
    "{name} should be from {least} to {most}, not {value}.":
        "{name}: يجب إدخال قيمة من {least} إلى {most}، لا {value}.",
    "{name} {value}{of} is unknown; there are {known}.":
        "{name}{of}: القيمة {value} غير معروفة، والمتاح: {known}.",
    "{sampler}{of} has no {spacing} spacing; it has {known}.":
        "الطريقة {sampler}{of} ليس لها التباعد {spacing}، والمتاح: {known}.",
    "Pictures of {width}x{height} were asked for; this server makes {here_width}x{here_height}.":
        "طُلبت صور بمقاس \u2066{width}×{height}\u2069، وهذا الخادم ينشئ "
        "\u2066{here_width}×{here_height}\u2069.",
    "What is filled in cannot be read; please load the page again.":
        "تعذّرت قراءة ما كُتب في الحقول؛ يُرجى إعادة تحميل الصفحة.",
    "Unknown settings{of}: {names}.": "إعدادات غير معروفة{of}: {names}.",
    "The own settings should be a list, one of each prompt.":
        "يجب أن تكون الإعدادات الخاصة قائمة، لكل وصف واحد منها.",
    "There are {count} own settings for {places} prompts.":
        "عدد الإعدادات الخاصة {count}، وعدد الأوصاف {places}.",
    "The own settings{of} should be values by name, not {value}.":
        "الإعدادات الخاصة{of}: يجب إدخال قيم بأسمائها، لا {value}.",
    "The link cannot be read.": "تعذّرت قراءة الرابط.",
    # a comparison
    "There is nothing to compare yet: give up to {limit} values.":
        "لا شيء للمقارنة بعد: يمكن إدخال {limit} قيم على الأكثر.",
    "There are {count} values to compare; at most {limit} fit.":
        "عدد القيم المراد مقارنتها {count}، والحد الأقصى {limit}.",
    # what a sampler cannot do
    "{whose}{reason}": "{whose}{reason}",
    "{sampler} takes 1 to {total} steps, not {steps}.":
        "الطريقة {sampler}: عدد الخطوات من 1 إلى {total}، لا {steps}.",
    "LCM takes at most {limit} steps here, not {steps}.":
        "الطريقة LCM: أقصى عدد للخطوات هنا {limit}، لا {steps}.",
    "{steps} steps are too many for {sampler} with {spacing} spacing: some of the {total} "
    "timesteps would repeat. Take fewer steps or another spacing.":
        "عدد الخطوات {steps} كبير جدًا على الطريقة {sampler} بالتباعد {spacing}: سيتكرر بعض "
        "الخطوات الزمنية وعددها {total}. قلّل الخطوات أو اختر تباعدًا آخر.",
    # a picture that is read
    "The file is larger than {limit} MiB.": "حجم الملف أكبر من {limit} ميبي بايت.",
    "The picture has far too many pixels.": "عدد بكسلات الصورة كبير جدًا.",
    "The file is not a PNG picture; no other kind carries settings here.":
        "الملف ليس صورة PNG، ولا إعدادات تُقرأ هنا من غيرها.",
    "The file is not a whole PNG picture.": "الملف ليس صورة PNG سليمة.",
    "The picture carries no settings: its PNG has no 'parameters' text.":
        "لا تحمل الصورة أي إعدادات: ليس في ملفها نص باسم parameters.",
    "The file cannot be read ({reason}).": "تعذّرت قراءة الملف ({reason}).",
    "The text is far too long to be a picture's settings.":
        "النص أطول بكثير من أن يكون إعدادات صورة.",
    "The text holds no picture settings: no line begins with 'Steps:'.":
        "لا يحوي النص إعدادات صورة: لا سطر يبدأ بكلمة \u2066Steps:\u2069.",
    "The picture's settings lack {names}.": "تنقص إعدادات الصورة هذه القيم: {names}.",
    "The picture's settings are garbled: {name}.": "إعدادات الصورة تالفة: {name}.",
    "The picture's size should be like 512x512, not {value}.":
        "يجب أن يُكتب مقاس الصورة مثل \u2066512x512\u2069، لا {value}.",
    # the server
    "The server is shutting down.": "الخادم قيد الإيقاف.",
    "Too many people are waiting; please try again in a minute.":
        "المنتظرون كثيرون الآن، يُرجى المحاولة بعد دقيقة.",
    "The server failed; please try again.": "حدث خطأ في الخادم، يُرجى المحاولة مرة أخرى.",
    "Compiling failed: {reason}": "فشل التجهيز: {reason}",
    "Making the pictures failed: {reason}": "فشل إنشاء الصور: {reason}",
    # the history
    "{what} ({reason}).": "{what} ({reason}).",
    "The history cannot be kept in {folder}": "تعذّر حفظ السجل في {folder}",
    "The picture could not be added to the history": "تعذّرت إضافة الصورة إلى السجل",
    "The history cannot be read or changed": "تعذّرت قراءة السجل أو تغييره",
    "An owner is a text of at least {least} random characters.":
        "المالك نص من {least} حرفًا عشوائيًا على الأقل.",
}
