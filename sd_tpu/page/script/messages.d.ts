// Made of sd_tpu/page/schema.py by `make script`: fbd7c7d8ef7a5bbf

export type Asked =
    | Plain
    | OfCard
    | Change
    | OfPicture
    | Take
    | Read
    | Paint
    | Compare
    | Journey
    | Movie
    | Show
    | Watch
    | Look
    | ChooseModel
    | Link
    | OfHistory;

/**
 * An action that needs nothing else.
 */
export interface Plain {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "generate" | "stop" | "known" | "zip" | "grid" | "about";
}
/**
 * Texts that are filled in; `own` are those of each box, by name, and `keep` the kept cards.
 */
export interface Form {
    /**
     * @maxItems 8
     */
    prompts: string[];
    seed: string;
    settings: {
        [k: string]: string;
    };
    /**
     * @maxItems 8
     */
    own: {
        [k: string]: string;
    }[];
    /**
     * @maxItems 8
     */
    keep: boolean[];
}
/**
 * An action on one card.
 */
export interface OfCard {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "vary" | "larger" | "redraw" | "live";
    place: number;
}
/**
 * Draw a card's picture anew, changed as words say.
 */
export interface Change {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "change";
    place: number;
    words: string;
    strength: number;
}
/**
 * An action on the picture of a card or, by its name, of the history.
 */
export interface OfPicture {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "again" | "before" | "large";
    place?: number | null;
    id?: string | null;
}
/**
 * Use a picture as a start, control or reference picture, or as a mask.
 */
export interface Take {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "take";
    place?: number | null;
    id?: string | null;
    file?: string | null;
    or_read?: boolean;
    mask_of?: string | null;
}
/**
 * Read the settings of an uploaded picture.
 */
export interface Read {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "read";
    file: string;
}
/**
 * Look at a start picture to paint a mask on it.
 */
export interface Paint {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "paint";
    input: string;
}
/**
 * Draw the first prompt with several values of one setting.
 */
export interface Compare {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "compare";
    what: string;
    values: string | string[];
}
/**
 * Draw the way from a card's picture to another's, or to another seed.
 */
export interface Journey {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "journey";
    place: number;
    to: number | null;
    count: number;
}
/**
 * Look at the last journey, or download it.
 */
export interface Movie {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "movie";
    kind?: string | null;
}
/**
 * Show a former run, or the browser's last one.
 */
export interface Show {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "show";
    shown?: string | null;
}
/**
 * Follow a run, from a version on; `before` says that its end is old news.
 */
export interface Watch {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "watch";
    seen: number;
    before: boolean;
}
/**
 * Check what is filled in; a page that is `fresh` also asks for the models.
 */
export interface Look {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "look";
    fresh?: boolean;
}
/**
 * Fill in the settings that a model brings along.
 */
export interface ChooseModel {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "model";
    model: string;
}
/**
 * Fill in what a link describes.
 */
export interface Link {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "link";
    link: string;
}
/**
 * Show the history after one of its buttons.
 */
export interface OfHistory {
    lang: string;
    browser: string | null;
    run: string | null;
    form: Form;
    do: "history";
    act:
        | "show"
        | "more"
        | "only"
        | "view"
        | "save"
        | "run"
        | "favourite"
        | "delete"
        | "clear"
        | "restore";
    pages?: number;
    favourites?: boolean;
    words?: string;
    id?: string | null;
    to?: string | null;
}
